"""Draws what compression costs: KL against bits for codecs, against bytes for recipes.

python -m kvjax.eval.plot_quality --results eval/results --out docs
"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS, PAPERS, CHANGED = "#1f6f8b", "#c8a15a", "#888888"
GROUPED = ("nvfp4", "ternary", "kivi4", "kivi2")
LINES = ("-", "--")
CONTROL = "random"


def draw_codecs(axes: plt.Axes, record: dict) -> None:
    """Each codec at its payload, with a line to all that a slot holds."""
    for result in record["results"]:
        if result["name"] == "bf16":
            continue  # whose KL is rounding
        grouped = result["name"] in GROUPED
        color = CHANGED if result["ablation"] else PAPERS if grouped else OURS
        payload, slot, kl = result["bits"]["payload"], result["bits"]["slot"], result["kl_mean"]
        axes.plot([payload, slot], [kl, kl], "-", color=color, linewidth=1)
        axes.plot(payload, kl, "o", color=color, markersize=5)
        axes.annotate(
            result["name"], (slot, kl), (4, 0), textcoords="offset points", fontsize=7, va="center"
        )
    axes.set_yscale("log")
    axes.set_xlabel("bits a channel: payload (dot) to slot (end of the line)")
    axes.set_ylabel("KL(full || compressed), nats")
    axes.margins(x=0.18)
    axes.set_title(_title(record), fontsize=9)


def draw_recipes(axes: plt.Axes, record: dict) -> None:
    """A line for each method and codec over its budgets; random eviction in black."""
    results = [result for result in record["results"] if "refused" not in result]
    evicting = sorted({result["name"] for result in results if result["share"] > 1})
    codecs = list(dict.fromkeys(r["codec"] for r in results if r["share"] > 1))
    colors = plt.get_cmap("tab10")
    for i, name in enumerate(evicting):
        color = "black" if name.startswith(CONTROL) else colors(i)
        marker = "x" if name == CONTROL else "s" if name.startswith(CONTROL) else "o"
        for codec, style in zip(codecs, LINES, strict=False):
            points = [
                (result["row_ratio"], result["kl_mean"])
                for result in results
                if result["name"] == name and result["codec"] == codec
            ]
            label = name if codec == codecs[-1] else None
            if not points:
                continue
            axes.plot(
                *zip(*sorted(points), strict=True),
                style,
                color=color,
                marker=marker,
                markersize=4,
                linewidth=1,
                label=label,
            )
    for result in results:
        if result["share"] > 1 or result["name"] == "full":
            continue
        at = result["row_ratio"], result["kl_mean"]
        axes.plot(*at, "*", color=PAPERS, markersize=9)
        axes.annotate(result["codec"], at, (5, 3), textcoords="offset points", fontsize=7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for which in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        which(lambda value, _: f"{value:g}")
    axes.tick_params(axis="x", which="minor", labelsize=7)
    axes.set_xlabel("bytes allocated for a row, over a bare bfloat16 cache")
    axes.set_ylabel("KL(full || compressed), nats")
    styles = ", ".join(
        f"{codec} {'solid' if style == '-' else 'dashed'}"
        for codec, style in zip(codecs, LINES, strict=False)
    )
    axes.set_title(f"{_title(record)}\n{styles}; stars evict nothing", fontsize=9)
    axes.legend(frameon=False, fontsize=7, loc="lower left")


def _title(record: dict) -> str:
    return f"{record['model']}, float32, {record['scored']:,} scored tokens of {record['text']}"


DRAW = {"codecs": draw_codecs, "recipes": draw_recipes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("eval/results"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs"))
    args = parser.parse_args()
    for name, draw in DRAW.items():
        source = args.results / f"{name}.json"
        if not source.exists():
            continue
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        draw(axes, json.loads(source.read_text()))
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(args.out / f"{name}.png", dpi=130)
        plt.close(figure)


if __name__ == "__main__":
    main()
