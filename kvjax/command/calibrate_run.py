"""One run of the calibrate command: from its options to the calibration."""

import dataclasses
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Iterator

import numpy as np

import kvjax
from kvjax import loading
from kvjax.command.calibrate_options import CalibrateConfig
from kvjax.command.compile_cache import keep_compiled_programs
from kvjax.command.files import check_apart, check_matplotlib, check_writable
from kvjax.command.inputs import model_name, prompt_options, stream_options
from kvjax.command.interrupt import INTERRUPTED, Interrupts
from kvjax.command.outline import outline, shape_of_model
from kvjax.command.prompts import Row, read_rows
from kvjax.decoding.requests import read_prompt
from kvjax.errors import CapacityError, KvjaxError, NumericalError, UsageError
from kvjax.files import write_atomically
from kvjax.memory import device_memory
from kvjax.recipes import full
from kvjax.report.progress import ProgressLine, describe
from kvjax.report.say import say
from kvjax.thoughts.calibration import Calibration
from kvjax.thoughts.density import Fit, fit
from kvjax.thoughts.record import record
from kvjax.thoughts.samples import Samples


def run(config: CalibrateConfig, interrupts: Interrupts, config_file: str | None = None) -> int:
    """Calibrate and return the exit code. All that can be refused is refused before weights load.

    Raises:
        KvjaxError: nothing more can be done; samples taken so far stay.
    """
    settings = config.fit_settings()
    _check_outputs(config, config_file)
    rows = _read(config)
    keep_compiled_programs()
    shape = shape_of_model(config.decoding())
    windows = shape.config.windows
    if None not in windows:
        raise UsageError(f"every layer of {shape.source} has a sliding window: none can be chosen")
    asked = [_ask(shape, row, config) for row in rows]
    _check_lengths(config, shape, asked)
    path = loading.resolve(shape.source, config.revision)
    shape = dataclasses.replace(shape, fingerprint=loading.read_fingerprint(path))
    measuring = _Measuring(config, shape, asked, interrupts)
    if not measuring.finish():
        return INTERRUPTED
    found = fit(measuring.in_order(), windows, settings)
    calibration = Calibration.of(
        found,
        fingerprint=shape.fingerprint,
        model=model_name(shape.source),
        settings=dataclasses.asdict(settings) | measuring.decoded_with,
    )
    calibration.save(config.output)
    if config.plot is not None:
        _draw(found, calibration, config.plot)
    if not config.keep_samples:
        measuring.store.remove()
    _tell(config, found, windows)
    return 0


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A prompt as token ids, and the given answer's if it is not to be decoded."""

    row: Row
    ids: tuple[int, ...]
    answer: tuple[int, ...] | None


def _check_outputs(config: CalibrateConfig, config_file: str | None) -> None:
    if config.output is None:
        raise UsageError("no output: name the file for the calibration with --out")
    if config.plot is not None:
        check_matplotlib("--plot")
    named = (config.prompts, config.texts, config.model, config.tokenizer, config_file)
    inputs = tuple(path for path in named if path and path != "-" and os.path.exists(path))
    check_apart({"--out": config.output, "--plot": config.plot})
    check_writable(config.output, "--out", inputs)
    if config.plot is not None:
        check_writable(config.plot, "--plot", inputs)


def _read(config: CalibrateConfig) -> list[Row]:
    """The lines to be used. One that cannot be would leave a calibration of other prompts."""
    if not config.prompts and not config.texts:
        raise UsageError("no prompts: give --prompts or --texts")
    path, flag = (config.texts, "--texts") if config.texts else (config.prompts, "--prompts")
    rows = read_rows(path, flag, answers=bool(config.texts))[: config.limit]
    if error := next((row.error for row in rows if row.error), None):
        raise UsageError(f"{flag}: {path}: {error}")
    return rows


def _ask(shape: loading.LanguageModel, row: Row, config: CalibrateConfig) -> _Asked:
    options = prompt_options(config.decoding(), full())
    try:
        ids = read_prompt(shape, 0, row.prompt, options).ids
    except KvjaxError as error:
        raise type(error)(f"prompt {row.id!r}: {error}") from error
    if row.answer is None:
        return _Asked(row, ids, None)
    return _Asked(row, ids, tuple(shape.tokenizer.encode(row.answer, starts=False)))


def _check_lengths(
    config: CalibrateConfig, shape: loading.LanguageModel, asked: list[_Asked]
) -> None:
    if not config.texts:
        rows = [one.row for one in asked]
        outline(config.decoding(), rows).plan(full(), device_memory()).check()
        return
    context = shape.config.context_length
    for one in asked:
        if (total := len(one.ids) + len(one.answer)) > context:
            raise CapacityError(
                f"prompt {one.row.id!r} and its answer have {total} tokens and the model's context "
                f"holds {context}: shorten the answer"
            )
    longest = max(len(one.answer) for one in asked)
    if longest < config.min_samples:
        raise UsageError(
            f"the longest answer has {longest} tokens and --min-samples is {config.min_samples}: "
            "lower it, or give longer answers"
        )


class _Measuring:
    """Takes the samples that are missing, and keeps each as soon as it is there.

    Attributes:
        decoded_with: all that decides the samples beside the model.
        store: the folder beside the calibration.
    """

    def __init__(
        self,
        config: CalibrateConfig,
        shape: loading.LanguageModel,
        asked: list[_Asked],
        interrupts: Interrupts,
    ):
        self._config, self._shape, self._asked = config, shape, asked
        self._interrupts = interrupts
        self._progress = ProgressLine(sys.stderr, enabled=not config.quiet)
        self._phase = ""
        self.decoded_with = _decoded_with(config, asked)
        self.store = Samples(
            pathlib.Path(os.path.realpath(config.output) + ".samples"),
            {"fingerprint": shape.fingerprint} | self.decoded_with,
            shape.config.num_layers,
        )
        self._samples = self.store.read()

    def finish(self) -> bool:
        """Measure what is missing; False if the user interrupted."""
        total = len(self._asked)
        missing = [i for i in range(total) if i not in self._samples]
        if self._samples and not self._config.quiet:
            kept = f"{total - len(missing)} of {total} prompts"
            self._say(f"going on after {kept}, whose samples are in {self.store.folder}")
        if missing:
            try:
                self._measure(missing)
            finally:
                self._progress.clear()
        if len(self._samples) == total:
            return True
        self._say(
            f"interrupted after {len(self._samples)} of {total} prompts; their samples are in "
            f"{self.store.folder}, and the same command goes on from there"
        )
        return False

    def in_order(self) -> list[np.ndarray]:
        """The samples of all prompts."""
        return [self._samples[i] for i in range(len(self._asked))]

    def _measure(self, missing: list[int]) -> None:
        lm = self._load()
        self._interrupts.wait_for_answers()
        answers = self._given if self._config.texts else self._decoded
        for i, tokens, reason in answers(lm, missing):
            one = self._asked[i]
            self._progress.phase(f"measuring {one.row.id!r}")
            sample = record(lm, one.ids, tokens)
            self.store.add(i, sample)
            self._samples[i] = sample
            if not self._config.quiet:
                done = f"{len(self._samples)}/{len(self._asked)}"
                self._say(f"{done} {one.row.id!r}: {len(tokens)} tokens, {reason}")

    def _load(self) -> loading.LanguageModel:
        config = self._config
        self._progress.phase(f"loading {self._shape.source}")
        return kvjax.load(
            self._shape.source,
            dtype=config.dtype,
            revision=config.revision,
            tokenizer=config.tokenizer,
        )

    def _given(
        self, lm: loading.LanguageModel, missing: list[int]
    ) -> Iterator[tuple[int, tuple[int, ...], str]]:
        del lm
        for i in missing:
            if self._interrupts.requested():
                return
            yield i, self._asked[i].answer, "given"

    def _decoded(
        self, lm: loading.LanguageModel, missing: list[int]
    ) -> Iterator[tuple[int, tuple[int, ...], str]]:
        events = kvjax.stream(
            lm,
            [self._asked[i].row.prompt for i in missing],
            **stream_options(self._config.decoding(), full()),
            should_stop=self._interrupts.requested,
        )
        for event in events:
            if event.kind == "phase":
                self._phase = event.phase
                self._progress.phase(f"{event.phase} (compiles at first)")
            elif event.kind == "text":
                self._progress.update(describe(self._phase, event.progress))
            else:
                i, result = missing[event.row], event.result
                if result.error:
                    raise NumericalError(f"prompt {self._asked[i].row.id!r}: {result.error}")
                if result.finish_reason != "interrupted":
                    yield i, result.tokens, result.finish_reason

    def _say(self, text: str) -> None:
        self._progress.clear()
        say(f"kvjax: {text}")


def _decoded_with(config: CalibrateConfig, asked: list[_Asked]) -> dict[str, str | float | None]:
    tokens = json.dumps([(one.ids, one.answer) for one in asked]).encode()
    found = {
        "answers": "given" if config.texts else "decoded",
        "prompts_sha256": hashlib.sha256(tokens).hexdigest(),
        "dtype": config.dtype,
    }
    if config.texts:
        return found
    options = stream_options(config.decoding(), full())
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    return found | {name: options[name] for name in names}


def _draw(found: Fit, calibration: Calibration, path: str) -> None:
    from kvjax.thoughts.plot import draw

    try:
        write_atomically(pathlib.Path(path), draw(found, calibration))
    except OSError as error:
        raise UsageError(f"--plot: cannot write {path}: {error.strerror}") from error


def _tell(config: CalibrateConfig, found: Fit, windows: tuple[int | None, ...]) -> None:
    prompts = len(found.densities)
    lines = []
    if short := len(windows) - windows.count(None):
        lines.append(f"{short} of {len(windows)} layers have a sliding window and are never chosen")
    if found.thresholds is not None:
        shares = ", ".join(f"{i} ({found.trimodal[i]:.0%})" for i in found.layers)
        low, high = found.thresholds
        lines.append(f"layers by share of {prompts} prompts with three modes: {shares}")
        lines.append(f"execution below {low:.4f}, transition above {high:.4f}: {config.output}")
    if not config.quiet:
        for line in lines:
            say(f"kvjax: {line}")
    if found.thresholds is None:
        most = max(found.trimodal[layer] for layer in found.ranking)
        say(
            f"kvjax: no layer is tri-modal: one shows three modes on {most:.0%} of the prompts "
            f"used ({prompts}) at best, and --min-share is {config.min_share:.0%}. "
            f"{config.output} says so: ThinKV then has one kind of thought, 4 bits throughout, "
            "and evicts at the budget"
        )
