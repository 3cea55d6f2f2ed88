"""A picture of one run: what the cache held, step by step."""

import io
import pathlib

import numpy as np

from kvjax.decoding.events import History
from kvjax.files import write_atomically

COLORS = {"R": "#1f6f8b", "E": "#7fb069", "T": "#d1495b"}
NAMES = {"R": "reasoning", "E": "execution", "T": "transition"}


def draw(history: History, title: str, path: str) -> None:
    """Draw live slots, coloured by thought, and bytes, over decode steps.

    Raises:
        OSError: the file cannot be written; what was there before stays.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (slots, held) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    try:
        step = history.lengths - history.prompt
        _draw_slots(slots, history, step)
        slots.set_title(title, fontsize=10)
        full = history.lengths * history.full_token_bytes
        held.plot(step, full / 2**20, ":", color="#888888", label="bare bfloat16 cache")
        held.plot(step, history.bytes / 2**20, color="#1f6f8b", label="pages owned")
        held.set_ylabel("MiB")
        held.set_xlabel("tokens of the answer")
        for axes in (slots, held):
            axes.legend(frameon=False, fontsize=8, loc="upper left")
            axes.spines[["top", "right"]].set_visible(False)
        content = io.BytesIO()
        figure.savefig(content, dpi=130, format="png")
        write_atomically(pathlib.Path(path), content.getvalue())
    finally:
        plt.close(figure)


def _draw_slots(axes, history: History, step: np.ndarray) -> None:
    axes.set_ylabel("tokens held a KV head")
    axes.step(step, history.live, color="black", linewidth=1, label="live, mean of layers")
    if history.sizes is None:
        return
    below = history.live - history.sizes.sum(1)
    axes.fill_between(step, 0, below, step="pre", color="#dddddd", label="prompt", linewidth=0)
    shown = set()
    for segment, kind in enumerate(history.kinds):
        top = below + history.sizes[:, segment]
        label = None if kind in shown else NAMES[kind]
        shown.add(kind)
        axes.fill_between(
            step, below, top, step="pre", color=COLORS[kind], label=label, linewidth=0
        )
        axes.step(step, top, color="white", linewidth=0.4)
        below = top
    falls = (np.diff(history.sizes, axis=0) < 0).any(1)
    axes.plot(
        step[1:][falls],
        np.full(falls.sum(), 0.0),
        "k^",
        markersize=4,
        clip_on=False,
        label="evictions",
    )
