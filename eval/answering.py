"""Answers to groups of problems under every recipe, a row as soon as it is there."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import kvjax
from kvjax.command.inputs import prompt_options
from kvjax.command.recipe import flags_in_errors
from kvjax.decoding import Result
from kvjax.decoding.requests import read_prompt
from kvjax.errors import KvjaxError, NumericalError, UsageError
from kvjax.eval.options import EvalConfig
from kvjax.eval.problems import Group, Problem
from kvjax.eval.recipes import Named, Settled, Work, settle
from kvjax.eval.rows import GatheredRows, Rows, row_key
from kvjax.loading import LanguageModel
from kvjax.recipes import full
from kvjax.report.progress import ProgressLine, describe
from kvjax.train.reasoner.vocabulary import SIZE

PLACE = ("task", "level", "id", "recipe", "sample")


@dataclasses.dataclass(frozen=True)
class Asked:
    """A group's problems as a model reads them.

    Attributes:
        prompts: token ids by the problem's id.
        errors: why a problem cannot be asked, by its id.
    """

    group: Group
    prompts: dict[str, tuple[int, ...]]
    errors: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Job:
    """A group under a recipe."""

    asked: Asked
    settled: Settled


def ask(lm: LanguageModel, group: Group, config: EvalConfig) -> Asked:
    """Tokenise a group's prompts.

    Raises:
        UsageError: none of them can be asked of this model.
    """
    if group.task == "reasoner" and lm.config.vocab_size != SIZE:
        raise UsageError(
            f"--tasks reasoner is for its own model, whose vocabulary has {SIZE} tokens, and "
            f"{lm.source} has {lm.config.vocab_size}: pass --model eval/models/reasoner"
        )
    options = prompt_options(config.decoding(), full())
    prompts, errors = {}, {}
    for problem in group.problems:
        try:
            prompts[problem.id] = read_prompt(lm, 0, problem.prompt, options).ids
        except KvjaxError as error:
            errors[problem.id] = str(error)
    if not prompts:
        raise UsageError(f"task {group.task}: {next(iter(errors.values()))}")
    return Asked(group, prompts, errors)


def jobs(
    lm: LanguageModel, asked: list[Asked], named: list[Named], config: EvalConfig, *, beside: bool
) -> list[Job]:
    """Every group under every recipe, the full cache first.

    Args:
        beside: shares are of answers, and prompts come on top: see ``Work``.

    Raises:
        CapacityError: one does not fit the memory.
    """
    found = []
    for one in asked:
        group = one.group
        lengths = [len(ids) for ids in one.prompts.values()]
        work = Work(lengths, group.max_new_tokens, beside, group.answer_tokens)
        for recipe in named:
            settled = settle(recipe, lm, work, min(config.batch_size, len(lengths)))
            found.append(Job(one, settled))
    return found


class Answering:
    """What all jobs of a run share."""

    def __init__(
        self,
        lm: LanguageModel,
        config: EvalConfig,
        rows: Rows | GatheredRows,
        sampling: dict[str, Any],
        samples: int = 1,
    ):
        """Args:
        lm: the model; only its shape where nothing is decoded.
        rows: where answers go, or, where nothing is decoded, those that are there.
        sampling: options of ``kvjax.stream``.
        samples: answers to each problem.
        """
        self._lm, self._config, self._rows = lm, config, rows
        self._sampling, self._samples = sampling, samples

    def missing(self, job: Job, sample: int) -> list[tuple[Problem, str]]:
        """The problems of a job that have no answer yet, each with its row's key.

        Raises:
            UsageError: a row is another run's.
        """
        if job.settled.recipe is None:
            return []
        group = job.asked.group
        shared = job.settled.origin(self._lm, self._config)
        shared += [group.max_new_tokens, self._sampling]
        found = []
        for problem in group.problems:
            ids = job.asked.prompts.get(problem.id)
            key = row_key(*shared, ids, problem.prompt, problem.gold, problem.answer)
            if not self._rows.has(key, **_place(job, problem, sample)):
                found.append((problem, key))
        return found

    def count(self, todo: list[Job]) -> int:
        """Answers that are missing."""
        return sum(len(self.missing(job, n)) for job in todo for n in range(self._samples))

    def run(
        self, todo: list[Job], progress: ProgressLine, should_stop: Callable[[], bool]
    ) -> Iterator[dict[str, Any]]:
        """Answer what is missing; yields each row once it is written.

        Raises:
            KvjaxError: nothing more can be decoded, or written.
        """
        for job in todo:
            for sample in range(self._samples):
                missing = self.missing(job, sample)
                if missing and not should_stop():
                    yield from self._answer(job, sample, missing, progress, should_stop)

    def _answer(
        self,
        job: Job,
        sample: int,
        missing: list[tuple[Problem, str]],
        progress: ProgressLine,
        should_stop: Callable[[], bool],
    ) -> Iterator[dict[str, Any]]:
        group, asked = job.asked.group, []
        for problem, key in missing:
            if problem.id in job.asked.prompts:
                asked.append((problem, key))
            else:
                failed = {"right": False, "finish": "error"}
                failed["error"] = job.asked.errors[problem.id]
                yield self._add(job, problem, sample, key, failed)
        if not asked:
            return
        name = f"{group.task} {_words(group.problems[0].level)}{job.settled.name}"
        events = kvjax.stream(
            self._lm,
            [list(job.asked.prompts[problem.id]) for problem, _ in asked],
            recipe=job.settled.recipe,
            max_new_tokens=group.max_new_tokens,
            batch_size=self._config.batch_size,
            seed=self._config.seed + sample,
            should_stop=should_stop,
            chat=False,  # token ids have been through the template
            **self._sampling,
        )
        done, phase = 0, ""
        # A problem that is left alone raises what its row already has.
        with flags_in_errors(), contextlib.suppress(NumericalError):
            for event in events:
                if event.kind == "phase":
                    phase = f"{name}: {done}/{len(asked)} rows · {event.phase}"
                    progress.phase(phase)
                elif event.kind == "text":
                    progress.update(describe(phase, event.progress))
                elif event.result.finish_reason != "interrupted":
                    done += 1
                    problem, key = asked[event.row]
                    found = self._judged(group, problem, event.result)
                    yield self._add(job, problem, sample, key, found)

    def _judged(self, group: Group, problem: Problem, result: Result) -> dict[str, Any]:
        found = {"right": False, "finish": result.finish_reason}
        if result.error:
            found["error"] = result.error
        else:
            found |= group.judge(problem, result)
        if not result.report:
            return found
        timing, kv = result.report["timing"], result.report["kv"]
        held = result.history.bytes
        return found | {
            "prompt": result.prompt_tokens,
            "generated": len(result.tokens),
            "think": result.report["usage"]["think"],
            "seconds": timing["prefill_s"] + timing["decode_s"],
            "bytes": {
                "peak": int(held.max()),
                "mean": float(held.mean()),
                "full_bf16": kv["bytes"]["full_bf16"],
            },
            "ratio": {name: kv["ratio"][name] for name in ("peak", "time_avg", "end")},
            "live_tokens": kv["live_tokens"]["max"],
            "reasoning": result.reasoning,
            "text": result.text,
        }

    def _add(
        self, job: Job, problem: Problem, sample: int, key: str, found: dict[str, Any]
    ) -> dict[str, Any]:
        row = {
            "key": key,
            **_place(job, problem, sample),
            "gold": problem.gold,
            **({} if problem.depth is None else {"depth": problem.depth}),
            **job.settled.as_dict(),
            **found,
        }
        self._rows.add(row)
        return row


def _place(job: Job, problem: Problem, sample: int) -> dict[str, Any]:
    group = job.asked.group
    values = (group.task, problem.level, problem.id, job.settled.name, sample)
    return dict(zip(PLACE, values, strict=True))


def _words(level: int | str | None) -> str:
    return "" if level is None else f"{level} "
