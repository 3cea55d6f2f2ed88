"""What rows of answers say of a recipe: how many are right, how long they are, what they hold."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvjax.eval.intervals import effective_count, mcnemar, wilson
from kvjax.report.units import size

Row = dict[str, Any]
OF_RECIPE = ("method", "budget", "codec", "share", "row_bytes")
"""What every row tells of its recipe."""
ALL = "all"
"""The level of figures over all levels of a task."""


def summarise(rows: Iterable[Row], levels: Callable[[Row], Any]) -> list[dict[str, Any]]:
    """Figures of every task, level and recipe, and of all levels together where there are several.

    A recipe is set beside the full cache on the problems that both have answered.

    Args:
        rows: of answers, each of its task, recipe, problem and sample once.
        levels: the level of a row.
    """
    cells: dict[tuple[str, Any], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        cells[row["task"], levels(row)][row["recipe"]].append(row)
        cells[row["task"], ALL][row["recipe"]].append(row)
    several = {task for task, level in cells if level not in (ALL, None)}
    kept = [at for at in cells if (at[1] == ALL) == (at[0] not in several)]
    kept += [(task, ALL) for task in several if sum(at[0] == task for at in kept) > 1]
    found = []
    for task, level in sorted(kept, key=_order):
        recipes = cells[task, level]
        full = next((own for own in recipes.values() if own[0]["method"] == "full"), None)
        for name, own in recipes.items():
            figures = _figures(own) | ({} if full in (None, own) else _beside(own, full))
            found.append({"task": task, "level": level, "recipe": name, **figures})
    return found


def _order(at: tuple[str, Any]) -> tuple:
    task, level = at
    return task, level == ALL, str(type(level)), () if level is None else level


def _figures(rows: Sequence[Row]) -> dict[str, Any]:
    by_problem = _by_problem(rows)
    share = statistics.fmean(row["right"] for row in rows)
    count = effective_count(list(by_problem.values()))
    decoded = [row for row in rows if "generated" in row]
    found = {
        **{name: rows[0][name] for name in OF_RECIPE},
        "problems": len(by_problem),
        "rows": len(rows),
        "right": share,
        "interval": wilson(share * count, count),
        "unanswered": _share(rows, lambda row: row.get("answer") is None),
        "loops": _share(rows, lambda row: row["finish"] == "repetition"),
        "truncated": _share(rows, lambda row: row["finish"] in ("length", "cache_full")),
        "failed": sum("error" in row for row in rows),
    }
    for name in ("late", "exact"):
        if all(name in row for row in decoded):
            found[name] = _share(decoded, lambda row, name=name: row[name])
    if not decoded:
        return found
    for name in ("prompt", "generated", "think", "seconds", "length", "live_tokens"):
        if all(name in row for row in decoded):
            found[name] = statistics.fmean(row[name] for row in decoded)
    return found | {name: means(decoded, name) for name in ("bytes", "ratio")}


def means(rows: Sequence[Row], name: str) -> dict[str, float]:
    """The means of what rows hold under a name."""
    return {key: statistics.fmean(row[name][key] for row in rows) for key in rows[0][name]}


def paired(lost: int, won: int) -> dict[str, Any]:
    """What was lost and won beside the full cache, and McNemar's test on it."""
    return {"lost": lost, "won": won, "p": mcnemar(lost, won)}


def described_pair(pair: dict[str, Any]) -> str:
    """``paired``, for people."""
    return f"lost {pair['lost']}, won {pair['won']}, p {pair['p']:.2g}"


def _beside(rows: Sequence[Row], full: Sequence[Row]) -> dict[str, Any]:
    """The same problems and samples with the full cache; a problem is lost where fewer of its
    samples are right."""
    ours, theirs = ({_at(row): row for row in found} for found in (rows, full))
    both = sorted(ours.keys() & theirs.keys(), key=repr)
    if not both:
        return {}
    a, b = (_by_problem([found[at] for at in both]) for found in (ours, theirs))
    lost = sum(sum(a[at]) < sum(b[at]) for at in a)
    won = sum(sum(a[at]) > sum(b[at]) for at in a)
    found = {"paired": {"problems": len(a), **paired(lost, won)}}
    long = [(ours[at], theirs[at]) for at in both]
    long = [(x, y) for x, y in long if "generated" in x and "generated" in y]
    if long:
        ratio = sum(x["generated"] for x, _ in long) / sum(y["generated"] for _, y in long)
        found["length_beside_full"] = ratio
    return found


def _at(row: Row) -> tuple[Any, ...]:
    return row["level"], row["id"], row["sample"]


def _by_problem(rows: Iterable[Row]) -> dict[Any, list[bool]]:
    found = defaultdict(list)
    for row in rows:
        found[row["level"], row["id"]].append(row["right"])
    return found


def _share(rows: Sequence[Row], holds: Callable[[Row], bool]) -> float:
    return sum(map(holds, rows)) / len(rows) if rows else 0.0


def described(found: dict[str, Any]) -> str:
    """One line of a table, for people."""
    level = "" if found["level"] == ALL else found["level"]
    head = f"{found['task']:10} {level!s:>6} {found['recipe']:18}"
    if "refused" in found:
        return f"{head} refused: {found['refused']}"
    low, high = found["interval"]
    parts = [f"{head} {found['right']:6.1%} [{low:.1%}, {high:.1%}] of {found['problems']:,}"]
    if "generated" in found:
        parts.append(f"{found['generated']:,.0f} tokens")
        parts.append(f"{size(found['bytes']['peak'])} ({found['ratio']['peak']:.3f})")
        parts.append(f"{found['seconds']:.1f} s")
    for name in ("late", "loops", "truncated"):
        if found.get(name):
            parts.append(f"{name} {found[name]:.1%}")
    if "paired" in found:
        parts.append(described_pair(found["paired"]))
    return " · ".join(parts)
