"""Draws the decode benchmarks' raw figures.

python -m kvjax.eval.plot_speed --results eval/results --out docs/speed.png
"""

import argparse
import json
import pathlib
import statistics

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS, PEER, FLOOR = "#1f6f8b", "#c8a15a", "#888888"


def draw_cpu(axes: plt.Axes, record: dict) -> None:
    """Every repeat of both sides, and their medians as bars."""
    results = record["results"]
    sides = [("kvjax", results["kvjax"], OURS), ("transformers\n+ PyTorch", results["peer"], PEER)]
    for x, (_, side, color) in enumerate(sides):
        raw = [turn["decode"] for turn in side["raw"]]
        axes.bar(x, statistics.median(raw), width=0.6, color=color)
        axes.plot([x] * len(raw), raw, "o", color="black", markersize=3)
    axes.set_xticks(range(len(sides)), [name for name, _, _ in sides])
    axes.set_ylabel("tokens/s")
    axes.set_title("SmolLM2-135M, float32, 2 CPU cores\ngreedy, 256 tokens", fontsize=10)


def draw_h200(axes: plt.Axes, record: dict) -> None:
    """Milliseconds a step over the batch, above what the bytes alone would take."""
    results = sorted(record["results"], key=lambda result: result["batch"])
    batches = [str(result["batch"]) for result in results]
    for x, result in enumerate(results):
        axes.bar(x, result["step_ms"], width=0.6, color=OURS, label="step" if x == 0 else None)
        axes.hlines(
            result["floor_ms"], x - 0.3, x + 0.3, FLOOR, lw=3, label="bytes" if x == 0 else None
        )
        axes.plot([x] * len(result["raw_ms"]), result["raw_ms"], "o", color="black", markersize=3)
    axes.set_xticks(range(len(results)), batches)
    axes.set_xlabel("rows")
    axes.set_ylabel("ms a step")
    axes.legend(frameon=False, loc="upper left")
    title = "Llama-3.1-8B's shape, bfloat16, H200\n1,024 tokens a row"
    axes.set_title(title, fontsize=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("eval/results"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/speed.png"))
    args = parser.parse_args()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    draw_cpu(left, json.loads((args.results / "decode_cpu.json").read_text()))
    draw_h200(right, json.loads((args.results / "decode_h200.json").read_text()))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.out, dpi=130)


if __name__ == "__main__":
    main()
