"""Perplexity against the measured rate, for adapters of every kind and for MatryoshkaKV.

    python -m kvjax.eval.bench_dynakv --text wiki.test.raw moby.txt --plot docs/dynakv.png \\
        --arm dynakv=runs/a,runs/b pca=runs/c --out eval/results/dynakv.json

Each text is read in windows of ``--window`` tokens, one behind the other, of which all but the
first token are scored, with keys and values as a cache would give them back: the hard mask, ranks
of ``exact`` as they are, those of ``blocks`` rounded up to the blocks that a cache stores. Rates
are those of the windows, keys and values apart. A perplexity's interval is that of the windows'
means. An adapter is one point; a folder of ``python -m kvjax.train.matryoshka`` is one for each of
its target rates.
"""

import argparse
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

import kvjax
from kvjax.dynakv.adapter import load_adapter
from kvjax.dynakv.spectrum import Spectra, key_width, with_settings
from kvjax.eval.record import run_record, write_json
from kvjax.eval.text import small_model
from kvjax.eval.windows import windows
from kvjax.train.dynakv.loss import (
    Trained,
    compressed_sums,
    cross_entropy,
    plain_cross_entropy,
)
from kvjax.train.matryoshka.files import RECORD, load_matryoshka
from kvjax.train.matryoshka.projections import Projections, truncated_states

BLOCKS = 8

Score = Callable[[Int[Array | np.ndarray, "1 T"]], tuple[Array, Array]]
"""From a window to its mean nats and the rates of keys and values."""


def rounded(spectra: Spectra, multiple: int) -> Spectra:
    """The same spectra, ranks being rounded up to multiples."""
    return with_settings(spectra, dataclasses.replace(spectra.settings, rank_multiple=multiple))


def plain_score(lm: kvjax.LanguageModel) -> Score:
    """The model as it is."""
    return functools.partial(_plain, lm.model)


def spectral_score(lm: kvjax.LanguageModel, spectra: Spectra) -> Score:
    """With the spectra of an adapter."""
    bases = jax.jit(lambda spectra: spectra.bases())(spectra)
    return functools.partial(_compressed, lm.model, spectra, bases)


def truncated_score(
    lm: kvjax.LanguageModel, projections: Projections, ranks: Int[np.ndarray, "L 2 H"]
) -> Score:
    """With MatryoshkaKV's projections."""
    return functools.partial(_truncated, lm.model, projections, ranks)


def points_of(
    lm: kvjax.LanguageModel, folder: pathlib.Path
) -> Iterator[tuple[dict[str, Any], dict[str, Score]]]:
    """What a folder holds: facts, and how the model reads with ranks of each kind.

    Raises:
        UsageError: it cannot be read, or belongs to another model.
    """
    if (folder / RECORD).exists():
        found = load_matryoshka(folder, lm, flag="--arm")
        step = lm.config.head_dim // BLOCKS
        for point in found.points:
            facts = {"folder": folder.name, "tokens": found.training["tokens"]}
            facts |= {"target_rate": point.target_rate}
            kinds = {"exact": point.ranks, "blocks": -(-point.ranks // step) * step}
            yield (
                facts,
                {kind: truncated_score(lm, found.projections, own) for kind, own in kinds.items()},
            )
        return
    adapter = load_adapter(folder, lm, flag="--arm")
    spectra = adapter.spectra
    facts = {"folder": folder.name, "tokens": adapter.training["tokens"]}
    facts |= {name: adapter.training[name] for name in ("alpha", "target_rate")}
    facts |= {"harden": adapter.training.get("harden", 1.0)}
    facts |= {name: getattr(spectra.settings, name) for name in ("gate", "tau")}
    blocks = rounded(spectra, key_width(lm.config) // BLOCKS)
    yield facts, {"exact": spectral_score(lm, spectra), "blocks": spectral_score(lm, blocks)}


def measured(score: Score, rows: Int[np.ndarray, "N T"]) -> dict[str, float | list[float]]:
    """Perplexity and rates over some windows."""
    found = [score(row[None]) for row in rows]
    nats, rates = (np.array(x, np.float64) for x in zip(*jax.device_get(found), strict=True))
    mean, error = nats.mean(), nats.std(ddof=1) / math.sqrt(len(nats)) if len(nats) > 1 else 0.0
    keys, values = rates.mean(0).tolist()
    return {
        "perplexity": math.exp(mean),
        "interval": [math.exp(mean - 1.96 * error), math.exp(mean + 1.96 * error)],
        "rate": (keys + values) / 2,
        "rate_keys": keys,
        "rate_values": values,
    }


@jax.jit
def _plain(model, tokens: Int[Array, "1 T"]) -> tuple[Array, Array]:
    nats, predicted = plain_cross_entropy(model, tokens, jnp.ones(tokens.shape, bool))
    return nats / predicted, jnp.ones(2)


@jax.jit
def _compressed(model, spectra, bases, tokens: Int[Array, "1 T"]) -> tuple[Array, Array]:
    """Mean nats, and the rates of keys and values."""
    valid = jnp.ones(tokens.shape, bool)
    own = Trained(model, spectra)
    sums = compressed_sums(own, bases, tokens, valid, mode="hard", remat=False)
    return sums.cross_entropy(), sums.hard.mean(0) / sums.tokens


@jax.jit
def _truncated(model, projections, ranks, tokens: Int[Array, "1 T"]) -> tuple[Array, Array]:
    hidden = truncated_states(model, projections, ranks, tokens)
    nats, predicted = cross_entropy(model, hidden, tokens, jnp.ones(tokens.shape, bool))
    return nats / predicted, ranks.mean((0, 2)) / model.config.head_dim


def arms(given: list[str]) -> Iterator[tuple[str, pathlib.Path]]:
    """Name and folder of each adapter of ``NAME=FOLDER,FOLDER`` arguments."""
    for one in given:
        name, found, folders = one.partition("=")
        if not found or not name or not folders:
            raise SystemExit(f"--arm takes NAME=FOLDER,FOLDER, got {one!r}")
        yield from ((name, pathlib.Path(folder)) for folder in folders.split(","))


def draw(record: dict, path: pathlib.Path) -> None:
    """A panel a text, a line an arm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    texts = list(record["full"])
    figure, panels = plt.subplots(1, len(texts), figsize=(5.2 * len(texts), 4), squeeze=False)
    for axes, text in zip(panels[0], texts, strict=True):
        for name in dict.fromkeys(result["arm"] for result in record["results"]):
            found = [result for result in record["results"] if result["arm"] == name]
            points = [(r["exact"][text]["rate"], r["exact"][text]["perplexity"]) for r in found]
            axes.plot(*zip(*sorted(points), strict=True), "o-", label=name, markersize=4)
        plain = record["full"][text]["perplexity"]
        axes.axhline(plain, color="black", linewidth=1)
        axes.annotate("full", (0.01, plain), xycoords=("axes fraction", "data"), va="bottom")
        axes.set_yscale("log")
        axes.set_xlabel("components stored, keys and values")
        axes.set_ylabel("perplexity")
        axes.set_title(text, fontsize=9)
    panels[0][0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=pathlib.Path, help="default: SmolLM2")
    parser.add_argument(
        "--arm", nargs="+", default=[], help="NAME=FOLDER,FOLDER of what was trained"
    )
    parser.add_argument("--text", type=pathlib.Path, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=65536, help="of each text, at most")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--commit", help="of the code, where this runs outside a checkout")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--plot", type=pathlib.Path, help="PNG; needs matplotlib")
    args = parser.parse_args(argv)
    folders = list(arms(args.arm))
    lm = kvjax.load(args.model, dtype="float32") if args.model else small_model()
    texts = {}
    for path in args.text:
        ids = lm.tokenizer.encode(path.read_text(encoding="utf-8"))[: args.tokens]
        if len(ids) < args.window:
            parser.error(f"--text {path} has {len(ids)} tokens, below --window {args.window}")
        texts[path.name] = windows(ids, args.window, args.window)
    full = {name: measured(plain_score(lm), rows) for name, rows in texts.items()}
    for name, found in full.items():
        print(f"full {name}: {found['perplexity']:.3f} over {texts[name].size:,} tokens")
    record = {"run": run_record(args.commit), "model": pathlib.Path(lm.source).name}
    record |= {"window": args.window, "blocks": BLOCKS, "full": full, "results": []}
    for arm, facts, kinds in (
        (arm, *point) for arm, folder in folders for point in points_of(lm, folder)
    ):
        result = {"arm": arm} | facts | {kind: {} for kind in kinds}
        for name, rows in texts.items():
            for kind, score in kinds.items():
                found = result[kind][name] = measured(score, rows)
                beside = found["perplexity"] / full[name]["perplexity"]
                print(
                    f"{arm} {name} {kind}: rate {found['rate']:.3f} (keys {found['rate_keys']:.3f},"
                    f" values {found['rate_values']:.3f}), perplexity {found['perplexity']:.3f}, "
                    f"{beside:.3f} of full"
                )
        record["results"].append(result)
        write_json(args.out, record)
    write_json(args.out, record)
    if args.plot:
        draw(record, args.plot)


if __name__ == "__main__":
    main()
