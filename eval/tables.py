"""From the results of each evaluation to what a table and a picture show of them."""

import dataclasses
from typing import Any

from kvjax.eval.summary import ALL
from kvjax.report.units import size

Found = dict[str, Any]
MANY = 12
"""Recipes in one picture that can be told apart."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One recipe in a picture.

    Attributes:
        recipe: its name.
        series: recipes that differ in their share alone belong together.
        y: what is measured, with its interval.
        bytes: of a row, at the peak.
        budget: in tokens, if it has one.
        tokens: of an answer; ``seconds`` until it was finished.
        x: where it stands on a curve over levels.
    """

    recipe: str
    series: str
    y: float
    interval: tuple[float, float]
    bytes: float
    budget: int | None = None
    tokens: float | None = None
    seconds: float | None = None
    x: float | None = None


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, a line of headings, lines of cells, and what is said below them."""

    title: str
    head: list[str]
    lines: list[list[str]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def refuse(self, found: Found) -> None:
        self.notes.append(f"{found['recipe']}: {found['refused']}")


def series_of(found: Found) -> str:
    """The recipe's name without the share that it ends with."""
    return found["recipe"].removesuffix(found["share"] or "").strip() or found["method"]


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _interval(bounds: tuple[float, float]) -> str:
    return f"{100 * bounds[0]:.1f} to {100 * bounds[1]:.1f}"


def _pair(found: Found | None) -> list[str]:
    if found is None:
        return ["", "", ""]
    return [f"{found['lost']}", f"{found['won']}", f"{found['p']:.2g}"]


def _held(found: Found, ratio: float) -> list[str]:
    return [size(found["bytes"]["peak"]), f"{ratio:.3f}"]


def _budget(found: Found) -> str:
    budget = found["budget"]
    return "" if budget is None else f"{budget:,}" if isinstance(budget, int) else f"{budget:g}"


def answer_tables(record: Found) -> list[Table]:
    """A table for each task and level of answers."""
    head = ["recipe", "right", "95 %", "lost", "won", "p", "tokens", "of full's", "loops"]
    head += ["cut off", "late", "peak", "of bf16", "mean", "budget", "seconds"]
    tables: dict[str, Table] = {}
    for found in record["results"]:
        title = _title(found["task"], found["level"])
        table = tables.setdefault(title, Table(title, head))
        if "refused" in found:
            table.refuse(found)
            continue
        line = [found["recipe"], percent(found["right"]), _interval(found["interval"])]
        line += _pair(found.get("paired"))
        if "generated" in found:
            line += [f"{found['generated']:,.0f}", _times(found.get("length_beside_full"))]
            line += [percent(found["loops"]), percent(found["truncated"])]
            line += [percent(found["late"]) if "late" in found else ""]
            line += _held(found, found["ratio"]["peak"])
            line += [size(found["bytes"]["mean"]), _budget(found), f"{found['seconds']:.1f}"]
        table.lines.append(line + [""] * (len(head) - len(line)))
    return list(tables.values())


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _title(task: str, level: Any) -> str:
    return task if level == ALL else f"{task}, {level}"


def perplexity_tables(record: Found) -> list[Table]:
    """The table of a text's perplexities."""
    head = ["recipe", "perplexity", "95 %", "nats beside full", "KL", "top-1", "peak"]
    head += ["of bf16", "budget"]
    title = (
        f"{record['text']}: window {record['window']:,}, stride {record['stride']:,}, "
        f"{record['scored']:,} tokens scored"
    )
    table = Table(title, head)
    for found in record["results"]:
        if "refused" in found:
            table.refuse(found)
            continue
        low, high = found["interval"]
        apart = found.get("beside_full")
        table.lines.append(
            [
                found["recipe"],
                f"{found['perplexity']:.3f}",
                f"{low:.2f} to {high:.2f}",
                f"{apart['nll']:+.4f} ± {apart['error']:.4f}" if apart else "",
                f"{found['kl']:.2e}",
                percent(found["top1"]),
                *_held(found, found["ratio"]["peak"]),
                _budget(found),
            ]
        )
    return [table]


def choice_tables(record: Found) -> list[Table]:
    """A table for each task of multiple choice."""
    head = ["recipe", "sum", "95 %", "lost", "won", "p", "per character", "per token", "peak"]
    head += ["of bf16", "budget"]
    tables: dict[str, Table] = {}
    for found in record["results"]:
        table = tables.setdefault(found["task"], Table(found["task"], head))
        if "refused" in found:
            table.refuse(found)
            continue
        by_sum = found["sum"]
        line = [found["recipe"], percent(by_sum["right"]), _interval(by_sum["interval"])]
        line += _pair(by_sum.get("paired"))
        line += [percent(found[rule]["right"]) for rule in ("per_character", "per_token")]
        table.lines.append([*line, *_held(found, found["ratio"]), _budget(found)])
    return list(tables.values())


def depth_tables(record: Found) -> list[Table]:
    """For each task and recipe what was found, lengths down and depths across."""
    cells: dict[tuple[str, str], dict[tuple[Any, Any], float]] = {}
    for found in record.get("by_depth", []):
        if found["level"] != ALL:
            own = cells.setdefault((found["task"], found["recipe"]), {})
            own[tuple(found["level"])] = found["right"]
    tables = []
    for (task, recipe), own in cells.items():
        lengths, depths = (sorted({at[i] for at in own}) for i in (0, 1))
        lines = [
            [
                f"{length:,}",
                *(percent(own[length, d]) if (length, d) in own else "" for d in depths),
            ]
            for length in lengths
        ]
        head = ["tokens", *(f"depth {depth:g}" for depth in depths)]
        tables.append(Table(f"{task}, {recipe}: right by length and depth", head, lines))
    return tables


def points(record: Found) -> dict[str, list[Point]]:
    """What is drawn, by the task: over all levels of it, or level by level where a recipe takes
    other bytes at another level, so that there is no one place for all of them."""
    drawn: dict[str, list[Point]] = {}
    for found in _run(record):
        task, level = found.get("task", record.get("text", "")), found.get("level", ALL)
        levels = _levels(record, task)
        together = not levels or (len(levels) > 1 and not _apart(record, task))
        if (level == ALL) == together:
            title = _title(task, level) if len(levels) > 1 else task
            drawn.setdefault(title, []).append(_point(found))
    return drawn


def curves(record: Found) -> dict[str, list[Point]]:
    """Of tasks with several levels that are numbers, every level of every recipe.

    Where there are too many to be told apart, those of each share are by themselves, beside the
    full cache.
    """
    drawn: dict[str, list[Point]] = {}
    some = [found for found in _run(record) if isinstance(found.get("level"), int)]
    some = [found for found in some if len(_levels(record, found["task"])) > 1]
    for found in some:
        task, alike = found["task"], [one for one in some if one["task"] == found["task"]]
        titles = [task]
        if len({one["recipe"] for one in alike}) > MANY:
            shares = dict.fromkeys(one["share"] for one in alike if one["method"] != "full")
            here = shares if found["method"] == "full" else [found["share"]]
            titles = [f"{task}, {share}" if share else task for share in here]
        point = dataclasses.replace(_point(found), series=found["recipe"], x=found["level"])
        for title in titles:
            drawn.setdefault(title, []).append(point)
    return drawn


def _run(record: Found) -> list[Found]:
    return [found for found in record["results"] if "refused" not in found and "bytes" in found]


def _apart(record: Found, task: str) -> bool:
    """Whether a recipe takes other bytes at another level."""
    sizes = {
        (one["recipe"], one["row_bytes"])
        for one in _run(record)
        if one["task"] == task and one["level"] != ALL
    }
    return len(sizes) > len({recipe for recipe, _ in sizes})


def _levels(record: Found, task: str) -> list[Any]:
    found = {one.get("level", ALL) for one in _run(record) if one.get("task", task) == task}
    return sorted(found - {ALL}, key=str)


def _point(found: Found) -> Point:
    own = found.get("sum", found)
    return Point(
        recipe=found["recipe"],
        series=series_of(found),
        y=found["perplexity"] if "perplexity" in found else own["right"],
        interval=tuple(own["interval"]),
        bytes=found["bytes"]["peak"],
        budget=found["budget"] if isinstance(found["budget"], int) else None,
        tokens=found.get("generated"),
        seconds=found.get("seconds"),
    )
