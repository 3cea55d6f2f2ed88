"""One run of the choice command: items scored under every recipe."""

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvjax.cache import Plan, plan
from kvjax.command.interrupt import Interrupts
from kvjax.errors import UsageError
from kvjax.eval.choice import ChoiceConfig
from kvjax.eval.command import finish, load, open_rows, refusal, telling
from kvjax.eval.intervals import wilson
from kvjax.eval.items import Item, read_items, split
from kvjax.eval.likelihood import Scored, log_likelihoods
from kvjax.eval.recipes import Settled, Work, read_recipes, settle, shape_of
from kvjax.eval.rows import Rows, row_key
from kvjax.eval.summary import OF_RECIPE, described_pair, means, paired
from kvjax.loading import LanguageModel
from kvjax.report.units import size

PLACE = ("task", "id", "recipe")
RULES = ("sum", "per_character", "per_token")
"""How the likelihoods of choices are compared: as they are, over the characters of the choice, and
over the tokens that are scored. One choice alone is right, by all of them, if it is what the model
would have said, token by token."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """An item as a model reads it: the tokens of every choice's context, and those scored."""

    item: Item
    contexts: list[list[int]]
    following: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Job:
    """A task under a recipe."""

    task: str
    asked: list[Asked]
    settled: Settled


def run(config: ChoiceConfig, interrupts: Interrupts) -> int:
    """Score and return the exit code. All that can be refused is refused before weights load.

    Raises:
        KvjaxError: nothing more can be done; rows written so far stay.
    """
    named = read_recipes(config)
    shape = shape_of(config)
    todo = []
    for task, path in _files(config):
        asked = _ask(shape, path, config)
        work = Work(
            [len(ids) for one in asked for ids in one.contexts],
            max(len(ids) for one in asked for ids in one.following),
        )
        todo += [Job(task, asked, settle(one, shape, work, config.batch_size)) for one in named]
    refused = [{"task": job.task} | refusal(job.settled) for job in todo if job.settled.refused]
    todo = [job for job in todo if job.settled.recipe]
    with open_rows(config, "choice", PLACE) as rows:
        scoring = _Scoring(config, rows)
        if any(scoring.missing(shape, job) for job in todo):
            lm = load(config, shape, interrupts)
            with telling(config) as progress:
                progress.phase("reading (compiles at first)")
                for done in scoring.run(lm, todo):
                    progress.update(done)
                    if interrupts.requested():
                        break
        found = {"results": summarise(rows.rows) + refused}
        return finish(config, "choice", shape, found, described, interrupts)


def _files(config: ChoiceConfig) -> list[tuple[str, pathlib.Path]]:
    found = []
    for name in (name.strip() for name in config.tasks.split(",")):
        path = pathlib.Path(name)
        if not name.endswith(".jsonl"):
            if config.data is None:
                raise UsageError(f"--tasks {name}: name the folder of {name}.jsonl with --data")
            path = pathlib.Path(config.data) / f"{name}.jsonl"
        found.append((path.stem, path))
    if len({task for task, _ in found}) < len(found):
        raise UsageError("--tasks: a task stands twice (a file is named without its folder)")
    return found


def _ask(lm: LanguageModel, path: pathlib.Path, config: ChoiceConfig) -> list[Asked]:
    if lm.tokenizer is None:
        raise UsageError(f"{lm.source} has no tokenizer: name one with --tokenizer")
    asked = []
    for item in read_items(path, config.items, config.first):
        pairs = zip(item.contexts, item.continuations, strict=True)
        contexts, following = zip(*(split(lm.tokenizer, *pair) for pair in pairs), strict=True)
        if not all(contexts):
            raise UsageError(f"{path}: a context of item {item.id} has no token of its own")
        if len(contexts) > config.batch_size:
            raise UsageError(
                f"--batch-size {config.batch_size} is below the {len(contexts)} choices of item "
                f"{item.id} of {path}"
            )
        asked.append(Asked(item, list(contexts), list(following)))
    return asked


class _Scoring:
    """Batches of items, those of like length together, so that few programs are compiled."""

    def __init__(self, config: ChoiceConfig, rows: Rows):
        self._config, self._rows = config, rows

    def missing(self, lm: LanguageModel, job: Job) -> list[tuple[Asked, str]]:
        """Items that are not scored yet, with the keys of their rows."""
        found, origin = [], job.settled.origin(lm, self._config)
        for one in job.asked:
            key = row_key(*origin, one.contexts, one.following, one.item.choices, one.item.gold)
            if not self._rows.has(key, task=job.task, id=one.item.id, recipe=job.settled.name):
                found.append((one, key))
        return found

    def run(self, lm: LanguageModel, todo: Sequence[Job]) -> Iterator[str]:
        """Score what is missing; tells what has been done, batch by batch."""
        for job in todo:
            missing = self.missing(lm, job)
            missing.sort(key=lambda pair: max(map(len, pair[0].contexts)))
            planned, done = self._plan(lm, job), 0
            for batch in self._batches(missing):
                found = iter(
                    log_likelihoods(
                        lm,
                        [ids for one, _ in batch for ids in one.contexts],
                        [ids for one, _ in batch for ids in one.following],
                        planned,
                        self._config.seed,
                    )
                )
                for one, key in batch:
                    own = [next(found) for _ in one.following]
                    self._rows.add({"key": key, **_row(job, one, own)})
                done += len(batch)
                yield f"{job.task}, {job.settled.name}: {done:,}/{len(missing):,} items"

    def _batches(self, missing: list[tuple[Asked, str]]) -> Iterator[list[tuple[Asked, str]]]:
        batch, count = [], 0
        for pair in missing:
            choices = len(pair[0].following)
            if count + choices > self._config.batch_size:
                yield batch
                batch, count = [], 0
            batch.append(pair)
            count += choices
        if batch:
            yield batch

    def _plan(self, lm: LanguageModel, job: Job) -> Plan:
        return plan(
            lm.config,
            job.settled.recipe,
            batch_size=self._config.batch_size,
            prompt_tokens=max(len(ids) for one in job.asked for ids in one.contexts),
            max_new_tokens=max(len(ids) for one in job.asked for ids in one.following),
            dtype=lm.dtype,
            parameter_bytes=lm.nbytes,
        )


def _row(job: Job, one: Asked, scored: list[Scored]) -> dict[str, Any]:
    sums = np.array([own.logs.sum(dtype=np.float64) for own in scored])
    by = {
        "sum": sums,
        "per_character": sums / [len(choice) for choice in one.item.choices],
        "per_token": sums / [len(own.logs) for own in scored],
    }
    failed = not np.isfinite(sums).all()

    def right(rule: str) -> bool:
        """Of one choice alone: whether the model would have said it."""
        if failed:
            return False
        return scored[0].greedy if len(scored) == 1 else int(by[rule].argmax()) == one.item.gold

    return {
        "task": job.task,
        "id": one.item.id,
        "recipe": job.settled.name,
        **job.settled.as_dict(),
        "gold": one.item.gold,
        "logs": sums.tolist() if not failed else None,
        "right": {rule: right(rule) for rule in RULES},
        **({"error": "NaN or infinity in the logits"} if failed else {}),
        "context": max(map(len, one.contexts)),
        "bytes": {
            "peak": statistics.fmean(own.peak_bytes for own in scored),
            "full_bf16": statistics.fmean(own.full_bytes for own in scored),
        },
    }


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Figures of every task and recipe, beside the full cache on the items that both have."""
    cells: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for row in rows:
        cells.setdefault(row["task"], {}).setdefault(row["recipe"], {})[row["id"]] = row
    found = []
    for task, recipes in cells.items():
        full = next((own for own in recipes.values() if _first(own)["method"] == "full"), None)
        for name, own in recipes.items():
            first, count = _first(own), len(own)
            figures = {"task": task, "recipe": name, **{key: first[key] for key in OF_RECIPE}}
            figures |= {"items": count, "failed": sum("error" in row for row in own.values())}
            for rule in RULES:
                right = sum(row["right"][rule] for row in own.values())
                figures[rule] = {"right": right / count, "interval": wilson(right, count)}
                if full is not None and own is not full:
                    figures[rule]["paired"] = _paired(own, full, rule)
            logs = [row["logs"] for row in own.values() if row["logs"] is not None]
            if logs and max(map(len, logs)) == 1:
                figures["perplexity"] = math.exp(-statistics.fmean(log for [log] in logs))
            figures["bytes"] = means(list(own.values()), "bytes")
            figures["ratio"] = figures["bytes"]["peak"] / figures["bytes"]["full_bf16"]
            found.append(figures)
    return found


def _first(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return next(iter(rows.values()))


def _paired(ours: dict[str, Any], theirs: dict[str, Any], rule: str) -> dict[str, Any]:
    both = [
        (ours[at]["right"][rule], theirs[at]["right"][rule]) for at in ours.keys() & theirs.keys()
    ]
    lost, won = both.count((False, True)), both.count((True, False))
    return {"items": len(both), **paired(lost, won)}


def described(found: dict[str, Any]) -> str:
    """One line of a table, for people."""
    head = f"{found['task']:14} {found['recipe']:18}"
    if "refused" in found:
        return f"{head} refused: {found['refused']}"
    low, high = found["sum"]["interval"]
    parts = [f"{head} {found['sum']['right']:6.1%} [{low:.1%}, {high:.1%}] of {found['items']:,}"]
    if "perplexity" in found:
        parts.append(f"perplexity {found['perplexity']:.4g}")
    else:
        parts += [f"{found[rule]['right']:.1%} {rule.replace('_', ' ')}" for rule in RULES[1:]]
    parts.append(f"{size(found['bytes']['peak'])} ({found['ratio']:.3f})")
    if "paired" in found["sum"]:
        parts.append(described_pair(found["sum"]["paired"]))
    return " · ".join(parts)
