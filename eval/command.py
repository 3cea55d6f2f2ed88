"""What the evaluation commands do alike, around their own work."""

import contextlib
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import kvjax
from kvjax.command.compile_cache import keep_compiled_programs
from kvjax.command.errors import ROWS_FAILED
from kvjax.command.interrupt import INTERRUPTED, Interrupts
from kvjax.command.output import print_out
from kvjax.eval.answering import PLACE, Answering, Job, ask, jobs
from kvjax.eval.options import EvalConfig
from kvjax.eval.problems import Group
from kvjax.eval.recipes import Settled, read_recipes, shape_of
from kvjax.eval.rows import GatheredRows, Rows, write_results
from kvjax.eval.summary import ALL, described
from kvjax.loading import LanguageModel
from kvjax.report.progress import ProgressLine
from kvjax.report.say import say

Summary = Callable[[list[dict[str, Any]]], dict[str, Any]]
"""From the rows of a run to its figures, of which ``results`` are told on standard output."""


@contextlib.contextmanager
def open_rows(
    config: EvalConfig, name: str, place: tuple[str, ...], gather: str | None = None
) -> Iterator[Rows | GatheredRows]:
    """The file of a run's rows, closed in the end; or what a folder's folders have, to be read."""
    if gather is None:
        rows = Rows(config.folder() / f"{name}.jsonl", place)
    else:
        rows = GatheredRows(pathlib.Path(gather), f"{name}.jsonl", place)
    try:
        yield rows
    finally:
        rows.close()


@contextlib.contextmanager
def telling(config: EvalConfig) -> Iterator[ProgressLine]:
    """A progress line, cleared in the end."""
    progress = ProgressLine(sys.stderr, enabled=not config.quiet)
    try:
        yield progress
    finally:
        progress.clear()


def load(config: EvalConfig, shape: LanguageModel, interrupts: Interrupts) -> LanguageModel:
    """The model with its weights; from here on an interrupt waits for what can still be kept."""
    keep_compiled_programs()
    with telling(config) as progress:
        progress.phase(f"loading {shape.source}")
        lm = kvjax.load(
            shape.source, dtype=config.dtype, revision=config.revision, tokenizer=config.tokenizer
        )
    interrupts.wait_for_answers()
    return lm


def finish(
    config: EvalConfig,
    name: str,
    lm: LanguageModel,
    record: dict[str, Any],
    line: Callable[[dict[str, Any]], str],
    interrupts: Interrupts,
    gather: str | None = None,
) -> int:
    """Write and tell the figures; returns the exit code.

    Args:
        config: the run's.
        name: of the file, less its ending.
        lm: the model, or its shape.
        record: figures; ``results`` is the list that is told.
        line: a result for people.
        interrupts: whether the run was ended.
        gather: the folder of the parts whose rows these figures are of.

    Raises:
        OutputError: they cannot be written.
    """
    parts = () if gather is None else sorted(pathlib.Path(gather).rglob(f"{name}.json"))
    settings = {
        "kind": name,
        "model": pathlib.Path(lm.source).name,
        "fingerprint": lm.fingerprint,
        "dtype": config.dtype,
        "seed": config.seed,
        "batch_size": None if gather else config.batch_size,
    }
    write_results(config.folder() / f"{name}.json", settings | record, config.commit, parts)
    for result in record["results"]:
        print_out(line(result) + "\n")
    if interrupts.requested():
        say(f"kvjax: interrupted; the same command goes on from {config.folder()}/{name}.jsonl")
        return INTERRUPTED
    bad = any("refused" in found or found.get("failed") for found in record["results"])
    return ROWS_FAILED if bad else 0


def refusal(settled: Settled) -> dict[str, Any]:
    """What results say of a recipe that could not be run; it is told at once as well."""
    say(f"kvjax: recipe {settled.name}: {settled.refused}")
    return {"recipe": settled.name, "refused": settled.refused}


def refusals(todo: list[Job]) -> list[dict[str, Any]]:
    """``refusal`` of every group under every recipe."""
    found = []
    for job in todo:
        if job.settled.recipe is None:
            group = job.asked.group
            levels = {problem.level for problem in group.problems}
            level = levels.pop() if len(levels) == 1 and None not in levels else ALL
            place = {"task": group.task, "level": level}
            found.append(place | refusal(job.settled))
    return found


def answer(
    config: EvalConfig,
    interrupts: Interrupts,
    name: str,
    groups: list[Group],
    summary: Summary,
    *,
    sampling: dict[str, Any],
    samples: int,
    beside: bool,
    gather: str | None = None,
) -> int:
    """Answer groups of problems under all recipes; returns the exit code.

    All that can be refused is refused before weights load.

    Args:
        config: the run's.
        interrupts: whether to end.
        name: of the run's files.
        groups: what is asked.
        summary: makes the figures.
        sampling: options of ``kvjax.stream``.
        samples: answers to each problem.
        beside: see ``kvjax.eval.recipes.Work``.
        gather: decode nothing, and take the rows of this folder's folders.

    Raises:
        KvjaxError: nothing more can be done; rows written so far stay.
    """
    named = read_recipes(config)
    shape = shape_of(config)
    asked = [ask(shape, group, config) for group in groups]
    todo = jobs(shape, asked, named, config, beside=beside)
    with open_rows(config, name, PLACE, gather) as rows:
        refused = refusals(todo)
        missing = Answering(shape, config, rows, sampling, samples).count(todo)
        if gather is not None:
            say(f"kvjax: {len(rows.rows):,} rows are there, {missing:,} are not")
        elif missing:
            if rows.rows and not config.quiet:
                say(f"kvjax: {len(rows.rows):,} rows are there, {missing:,} to go")
            lm = load(config, shape, interrupts)
            with telling(config) as progress:
                answering = Answering(lm, config, rows, sampling, samples)
                for _ in answering.run(todo, progress, interrupts.requested):
                    pass
        order = {one.name: place for place, one in enumerate(named)}
        kept = [row for row in rows.rows if row["recipe"] in order or config.only is None]
        found = summary(sorted(kept, key=lambda row: order.get(row["recipe"], len(order))))
        found["results"] = found["results"] + refused
        found |= {"sampling": sampling, "samples": samples}
        return finish(config, name, shape, found, described, interrupts, gather)
