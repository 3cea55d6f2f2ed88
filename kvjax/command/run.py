"""One run of the decode command: from its options to the answers."""

import os
import pathlib
import sys
import time

from jax.sharding import Mesh

import kvjax
from kvjax.command.calibrated import described_thoughts
from kvjax.command.compile_cache import keep_compiled_programs
from kvjax.command.decode_options import DecodeConfig
from kvjax.command.devices import mesh_of, own_file, own_share
from kvjax.command.errors import ROWS_FAILED
from kvjax.command.files import check_apart, check_matplotlib, check_writable
from kvjax.command.fit import allowed_memory, settled_recipe
from kvjax.command.inputs import model_source, read_answer, read_input, stream_options
from kvjax.command.interrupt import INTERRUPTED, Interrupts
from kvjax.command.kept import keep, read_kept
from kvjax.command.outline import limits, outline, prompt_lengths
from kvjax.command.output import Output, OutputError, open_output
from kvjax.command.prompts import Row
from kvjax.command.quality import compared
from kvjax.command.recipe import described, flags_in_errors, given_recipe
from kvjax.decoding.clock import Clock
from kvjax.decoding.events import Event, Result
from kvjax.dynakv.adapter import RECORD, TENSORS
from kvjax.errors import KvjaxError
from kvjax.fetch_model import default_model_path
from kvjax.memory import device_memory
from kvjax.recipes import Recipe
from kvjax.report.answers import Answers
from kvjax.report.footer import footer
from kvjax.report.process import process_start
from kvjax.report.progress import ProgressLine, describe
from kvjax.report.record import failed, failures, record
from kvjax.report.say import say
from kvjax.report.trace import draw
from kvjax.report.units import size, table


def run(config: DecodeConfig, interrupts: Interrupts, config_file: str | None = None) -> int:
    """Decode and return the exit code. All that can be refused is refused before weights load.

    Raises:
        KvjaxError: nothing more can be done; answers written so far stay.
    """
    recipe = given_recipe(config)
    allowed_memory(config)
    if config.trace is not None:
        check_matplotlib("--trace")
    rows = own_share(read_input(config))
    mesh = mesh_of(config.tp, config.dp)
    text = read_answer(config)
    named = (
        config.prompt_file,
        config.prompts,
        config.compare_text,
        config.calibration,
        config.head_shares,
        *(pathlib.Path(config.adapter, name) for name in (TENSORS, RECORD) if config.adapter),
        config.model or default_model_path(),
        config.tokenizer,
        config_file,
    )
    inputs = tuple(str(path) for path in named if path and path != "-" and os.path.exists(path))
    written = {
        "--output": config.output,
        "--save-cache": config.save_cache,
        "--trace": config.trace,
    }
    check_apart(written)
    if config.save_cache is not None:
        check_writable(config.save_cache, "--save-cache", inputs)
    if config.load_cache is not None:  # which may be saved to, but not answered to
        inputs = (*inputs, config.load_cache)
    if config.trace is not None:
        check_writable(config.trace, "--trace", inputs)
    growing = config.answer_format == "jsonl"
    output = open_output(own_file(config.output), growing=growing, inputs=inputs)
    interrupts.clean_up_with(lambda: output.close(complete=False))
    started = _Run(config, recipe, rows, text, output, interrupts, mesh)
    kept = False
    try:
        code = started.decode()
        kept = True
        return code
    except Exception:
        started.answers.finish()  # what was decoded before the failure
        kept = bool(started.answers.records)
        raise
    finally:
        output.close(complete=kept)


class _Run:
    """What the steps of one run share."""

    def __init__(
        self,
        config: DecodeConfig,
        recipe: Recipe | None,
        rows: list[Row],
        text: str | None,
        output: Output,
        interrupts: Interrupts,
        mesh: Mesh | None,
    ):
        self.config = config
        self.mesh = mesh
        self.recipe = recipe
        self.rows = rows
        self.text = text
        self.interrupts = interrupts
        self.answers = Answers(output, config.answer_format, listed=config.several)
        self.progress = ProgressLine(sys.stderr, enabled=not config.quiet)
        plain = config.answer_format == "text" and not config.several and not config.output
        automatic = plain and sys.stdout.isatty()
        self.streaming = automatic if config.stream is None else config.stream
        self.lm: kvjax.LanguageModel | None = None
        self.past: kvjax.Conversation | None = None
        self.phase = ""
        self.load_s = 0.0
        self.decode_s = 0.0
        self.first_token_s: float | None = None

    def decode(self) -> int:
        """Load, decode, tell; returns the exit code."""
        with Clock() as clock:
            keep_compiled_programs()
            self._settle()
            past = read_kept(self.config, self.recipe)
            self.lm = lm = self._load()
            self.past = past or read_kept(self.config, self.recipe, lm)
            loading_compiled = clock.compile_s
            self.interrupts.wait_for_answers()
            self._decode(lm)
            self.answers.finish()
            self.decode_s -= clock.compile_s - loading_compiled
        self._tell(clock.compile_s)
        if self.interrupts.requested():
            return INTERRUPTED
        return ROWS_FAILED if any(failures(self.answers.records)) else 0

    def _settle(self) -> None:
        """Choose the recipe, where the run's size decides it, and refuse what cannot work."""
        config, memory = self.config, allowed_memory(self.config)
        keeps_all = self.recipe is not None and self.recipe.keeps_all
        if keeps_all and memory is None and config.compare is None:
            return  # nothing to find out, and the library checks the memory
        outlined = outline(config, self.rows, self.text)
        self.recipe = settled_recipe(config, outlined)
        with flags_in_errors():
            planned = outlined.plan_of_longest(self.recipe, memory or device_memory())
            if config.compare is not None:
                outlined.check_comparison(config, self.recipe, memory or device_memory())
        at_once, rows = planned.geometry.longest, outlined.request["batch_size"]
        if at_once is not None and at_once < rows and not config.quiet:
            say(
                f"kvjax: --batch-size {config.batch_size}: the memory holds {at_once} rows of "
                f"{planned.tokens} tokens at once, and others wait for them to end"
            )
        thoughts = described_thoughts(self.recipe)
        if thoughts and not config.quiet:
            say(f"kvjax: {thoughts}")
        if config.fit is not None and not config.quiet:
            say(
                f"kvjax: --fit {config.fit} chose {described(self.recipe)} "
                f"({size(planned.geometry.nbytes)} of cache beside "
                f"{size(planned.parameter_bytes)} of weights)"
            )

    def _load(self) -> kvjax.LanguageModel:
        config = self.config
        source = model_source(config)
        self.progress.phase(f"loading {source}")
        started = time.perf_counter()
        with flags_in_errors():
            lm = kvjax.load(
                source,
                dtype=config.dtype,
                revision=config.revision,
                tokenizer=config.tokenizer,
                mesh=self.mesh,
            )
        self.load_s = time.perf_counter() - started
        return lm

    def _decode(self, lm: kvjax.LanguageModel) -> None:
        for i, row in enumerate(self.rows):
            if row.error is not None:
                for sample in range(self.config.samples):
                    self._add(i, sample, failed(row.id, row.error))
        good = [i for i, row in enumerate(self.rows) if row.error is None]
        prompts = [self.rows[i].prompt for i in good]
        options = stream_options(self.config, self.recipe)
        events = kvjax.stream(
            lm,
            prompts,
            **options,
            cache=self.past,
            memory_bytes=allowed_memory(self.config),
            should_stop=self.interrupts.requested,
        )
        started = time.perf_counter()
        try:
            with flags_in_errors():
                self._tell_limits(lm)
                for event in events if good else ():
                    self._take(event, good)
        except OutputError:
            raise
        except KvjaxError as error:
            # In a file, a prompt that happens to be alone fails like one beside others.
            if not self.config.prompts or len(good) > 1:
                raise
            for sample in range(self.config.samples):
                if self._place(good[0], sample) not in self.answers:
                    self._add(good[0], sample, failed(self.rows[good[0]].id, str(error)))
        finally:
            self.progress.clear()
            self.decode_s = time.perf_counter() - started

    def _tell_limits(self, lm: kvjax.LanguageModel) -> None:
        if self.config.quiet:
            return
        lengths = prompt_lengths(lm, self.rows, self.config, self.past)
        self.progress.clear()
        for line in limits(self.config, lm.config.context_length, lengths):
            say(f"kvjax: {line}")

    def _take(self, event: Event, good: list[int]) -> None:
        if event.kind == "phase":
            self.phase = event.phase
            self.progress.phase(f"{event.phase} (compiles at first)")
        elif event.kind == "text":
            self._take_text(event)
        elif event.kind == "done":
            row = good[event.row]
            made = record(self.rows[row].id, event.result, self.load_s, fit=self.config.fit)
            whole = event.result.finish_reason not in ("error", "interrupted")
            try:
                if self.config.compare and whole:
                    made["quality"] = self._compare(row)
            finally:  # whatever becomes of the comparison, there is an answer
                self._add(row, event.sample, made)
            if self.config.trace and event.result.history is not None:
                self._draw(event.result)
            keep(self.config, event.result)

    def _place(self, row: int, sample: int) -> int:
        """Where an answer stands in the output."""
        return row * self.config.samples + sample

    def _add(self, row: int, sample: int, record: dict) -> None:
        if self.config.samples > 1:
            record = {"id": record["id"], "sample": sample} | record
        self.answers.add(self._place(row, sample), record)

    def _draw(self, result: Result) -> None:
        try:
            draw(result.history, described(self.recipe), self.config.trace)
        except OSError as error:
            raise OutputError(f"--trace: {self.config.trace}: {error.strerror}") from error

    def _compare(self, row: int) -> dict:
        """The record of a comparison; of one that fails, why."""
        self.progress.phase("comparing with the uncompressed run")
        try:
            with flags_in_errors():
                prompt, stop = self.rows[row].prompt, self.interrupts.requested
                found = compared(self.lm, prompt, self.recipe, self.config, self.text, stop)
        except KvjaxError as error:
            return {"error": str(error)}
        finally:
            self.progress.clear()
        if self.config.answer_format == "text":
            say(table(found.rows()))
        return found.as_dict()

    def _take_text(self, event: Event) -> None:
        if self.first_token_s is None:
            self.first_token_s = time.time() - process_start()
        if not self.streaming:
            self.progress.update(describe(self.phase, event.progress))
            return
        if sys.stdout.isatty():
            self.progress.retire()  # the text has the terminal now
        self.answers.stream(event.text)
        self.progress.update(describe(self.phase, event.progress))

    def _tell(self, compile_s: float) -> None:
        config, records = self.config, self.answers.records
        whats = "prompts" if config.samples == 1 else "answers", "comparisons"
        for what, found in zip(whats, failures(records), strict=True):
            if found:
                message = f"{len(found)} of {len(self.rows) * config.samples} {what} failed"
                say(f"kvjax: {message}; the first has id {found[0][0]!r}: {found[0][1]}")
        automatic = sys.stderr.isatty() and not config.quiet
        if automatic if config.stats is None else config.stats:
            say(
                footer(
                    records,
                    first_token_s=self.first_token_s,
                    compile_s=compile_s,
                    decode_s=self.decode_s,
                )
            )
