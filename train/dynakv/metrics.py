"""What a training writes down of itself: a line of JSON for every step, and a picture."""

import io
import json
import pathlib
from typing import Any

from kvjax.files import write_atomically

METRICS, PICTURE = "metrics.jsonl", "training.png"


class Metrics:
    """A file of JSON lines, each with its ``step`` and ``kind`` ("step" or "eval")."""

    def __init__(self, path: pathlib.Path, last_step: int | None):
        """Go on writing a file behind ``last_step``, or begin a new one.

        What an interrupted run wrote later than its last checkpoint is taken out: it will happen
        again.
        """
        kept = [] if last_step is None else [r for r in read(path) if r["step"] <= last_step]
        self._path = path
        write_atomically(path, b"".join(_line(record) for record in kept))

    def add(self, kind: str, step: int, values: dict[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(_line({"step": step, "kind": kind, **values}))


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a file, none if there is no file; a half line at its end is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def draw(records: list[dict[str, Any]], title: str) -> bytes:
    """A PNG of losses and rates over the steps. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [record for record in records if record["kind"] == "step"]
    evals = [record for record in records if record["kind"] == "eval"]
    figure = Figure(figsize=(7, 6), layout="constrained")
    FigureCanvasAgg(figure)
    loss, rate, weight = figure.subplots(3, sharex=True, height_ratios=(2, 2, 1))

    def line(axes, of, name, label, color, **style):
        x, y = [r["step"] for r in of], [r[name] for r in of]
        axes.plot(x, y, label=label, color=color, linewidth=1, **style)

    line(loss, steps, "ce", "training", "#9ecae1")
    line(loss, evals, "ce_soft", "held out, soft mask", "#1f6f8b", marker=".")
    line(loss, evals, "ce_hard", "held out, hard mask", "#c8553d", marker=".")
    line(loss, evals, "ce_plain", "held out, not compressed", "#555555", linestyle="--")
    line(rate, steps, "rate_soft", "soft", "#9ecae1")
    line(rate, steps, "rate_hard", "hard", "#f4a582")
    line(rate, evals, "rate_keys", "held out, keys", "#1f6f8b", marker=".")
    line(rate, evals, "rate_values", "held out, values", "#c8553d", marker=".")
    line(weight, steps, "alpha", "alpha", "#555555")
    loss.set_ylabel("nats a token")
    rate.set_ylabel("share of components kept")
    rate.set_ylim(0, 1.02)
    weight.set_ylabel("alpha")
    weight.set_xlabel("step")
    for axes in (loss, rate):
        axes.legend(fontsize=7, frameon=False)
    for axes in (loss, rate, weight):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=9)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110, metadata={"Software": None})
    return content.getvalue()


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"
