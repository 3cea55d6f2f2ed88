"""Pictures of a report, drawn to be read on a phone."""

import io
import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kvjax.eval.tables import Point

COLORS = ("#1f6f8b", "#d1495b", "#c8a15a", "#7fb069", "#6a4c93", "#ff8c42", "#3d5a80", "#888888")
MARKERS = "oDs^vPX"
_FULL = "full"


def against_bytes(points: Sequence[Point], what: str) -> bytes:
    """What is measured over the bytes that a row holds at its peak."""
    return _draw(points, lambda point: point.bytes / 2**20, "MiB of a row at the peak", what)


def against_budget(points: Sequence[Point], what: str) -> bytes | None:
    """The same over budgets, the full cache as a line; None where no recipe has one."""
    bounded = [point for point in points if point.budget is not None]
    if not bounded:
        return None
    full = next((point for point in points if point.series == _FULL), None)
    return _draw(
        bounded,
        lambda point: point.budget,
        "budget, tokens a KV head",
        what,
        full=full,
    )


def tokens_and_time(points: Sequence[Point]) -> bytes | None:
    """Seconds until an answer is finished, over its tokens; None where nothing was generated."""
    answered = [point for point in points if point.tokens and point.seconds is not None]
    if not answered:
        return None
    figure, axes = _axes("tokens of an answer, mean", "seconds until it is finished, mean")
    for series, color, marker in _series(answered):
        own = [point for point in answered if point.series == series]
        axes.plot(
            [point.tokens for point in own],
            [point.seconds for point in own],
            marker,
            color=color,
            markersize=8,
            label=series,
        )
    axes.set_xlim(0, 1.1 * max(point.tokens for point in answered))
    axes.set_ylim(0, 1.1 * max(point.seconds for point in answered))
    return _png(figure, axes)


def by_level(points: Sequence[Point], what: str) -> bytes:
    """A curve for each recipe over the levels of a task, with intervals."""
    return _draw(points, lambda point: point.x, "level", what)


def by_recipe(points: Sequence[Point], what: str) -> bytes:
    """A line for each recipe, for more of them than colours can tell apart."""
    figure, axes = _axes(what, "")
    figure.set_figheight(1 + 0.27 * len(points))
    shares = "perplexity" not in what
    scale = 100 if shares else 1
    full = next((point for point in points if point.series == _FULL), None)
    if full is not None:
        axes.axvspan(*(scale * bound for bound in full.interval), color="#000000", alpha=0.07)
    errors = [[abs(point.y - point.interval[side]) * scale for point in points] for side in (0, 1)]
    axes.errorbar(
        [scale * point.y for point in points],
        range(len(points)),
        xerr=errors,
        fmt="o",
        color=COLORS[0],
        markersize=5,
        elinewidth=1,
        capsize=2,
    )
    axes.set_yticks(range(len(points)), [point.recipe for point in points], fontsize=10)
    axes.set_ylim(len(points) - 0.5, -0.5)
    if shares:
        axes.set_xlim(-3, 103)
    return _saved(figure)


def _draw(
    points: Sequence[Point],
    x: Callable[[Point], float],
    x_label: str,
    y_label: str,
    full: Point | None = None,
) -> bytes:
    figure, axes = _axes(x_label, y_label)
    shares = "perplexity" not in y_label
    scale = 100 if shares else 1
    if full is not None:
        axes.axhspan(*(scale * bound for bound in full.interval), color="#000000", alpha=0.07)
        axes.axhline(scale * full.y, color="#000000", linewidth=1, label=_FULL)
    for series, color, marker in _series(points):
        own = sorted((point for point in points if point.series == series), key=x)
        y = [scale * point.y for point in own]
        errors = [
            [max(0.0, scale * abs(point.y - point.interval[side])) for point in own]
            for side in (0, 1)
        ]
        axes.errorbar(
            list(map(x, own)),
            y,
            yerr=errors,
            fmt=f"{marker}-",
            color=color,
            markersize=7,
            linewidth=1.5,
            elinewidth=1,
            capsize=3,
            label=series,
        )
    values = sorted({x(point) for point in points})
    if values[0] > 0 and values[-1] > 4 * values[0]:
        axes.set_xscale("log", base=2)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    if shares:
        axes.set_ylim(-3, 103)
    return _png(figure, axes)


def _axes(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.6, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label, fontsize=12)
    axes.set_ylabel(y_label, fontsize=12)
    axes.tick_params(labelsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _series(points: Sequence[Point]) -> list[tuple[str, str, str]]:
    """Every series with a colour and a marker of its own; the full cache is black."""
    names = [name for name in dict.fromkeys(point.series for point in points) if name != _FULL]
    found = [
        (name, COLORS[i % len(COLORS)], MARKERS[i // len(COLORS) % len(MARKERS)])
        for i, name in enumerate(names)
    ]
    if any(point.series == _FULL for point in points):
        found.insert(0, (_FULL, "#000000", "*"))
    return found


def _png(figure: Figure, axes: Axes) -> bytes:
    handles, labels = axes.get_legend_handles_labels()
    columns = 2 if max(map(len, labels)) <= 24 else 1
    lines = math.ceil(len(labels) / columns)
    figure.set_figheight(figure.get_figheight() + 0.24 * max(0, lines - 6))
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=11
    )
    return _saved(figure)


def _saved(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, dpi=160, format="png")
    return content.getvalue()
