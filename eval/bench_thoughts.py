"""Do attention sparsity, blank lines and attention find the kinds of thought that are known?

    python -m kvjax.eval.bench_thoughts --model eval/models/reasoner --levels 1000 2000 --out FILE
    python -m kvjax.eval.bench_thoughts --traces FILE.jsonl --tokens 4096 --out FILE

The answers are read with the full cache. Traces are those of the reasoner, or of files in the
manner of Thought Anchors (arXiv 2506.19143), whose sentences are labelled; ``kvjax.eval.traces``
says which kind of thought a label is taken for.

``kinds``: how well a unit's (paragraph's, sentence's) mean sparsity orders two kinds, as the
probability that it is higher for a unit of the first kind: 0.5 is chance. Every layer on all
traces; and the layer that parts the pair best on every other trace, on the rest of them, which says
what can be had without having chosen by the outcome. With the interval that 95 % of the draws of
those traces give. Sparsity grows with the length, and kinds have their places in a trace: ``local``
is the same of what is left when the mean of the 512 tokens around is taken off.

``borders``: where one kind ends, the shares of those that are found and of found places that are
right, to ``--within`` tokens, beside as many places by lot. "newline" is a blank line, "sparsity"
the largest steps of the mean sparsity of 16 tokens (in the layer that finds most on every other
trace), "attention" TAM's second rule, jumps of attention, the attention being that of the
last 64 queries of every 1,024 tokens. The last two get as many places as there are borders.
"""

import argparse
import itertools
import pathlib
import statistics
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import scipy.ndimage
import scipy.stats
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.cache.plan import bucket
from kvjax.eval.record import run_record, write_json
from kvjax.eval.text import small_model
from kvjax.eval.traces import Trace, of_file, of_reasoner
from kvjax.matching.segments import breaks, newline_flags
from kvjax.models.attention import add_sinks, causal_attention, causal_mask
from kvjax.thoughts import KINDS
from kvjax.thoughts.record import record
from pallas_kernels.einsum import einsum_float32

PAIRS = tuple(itertools.combinations(range(len(KINDS)), 2))
DRAWS = 200
AROUND = 512
STEP = 16
"""Tokens on each side of a step of sparsity."""


def above(first: Float[np.ndarray, " N"], second: Float[np.ndarray, " M"]) -> float:
    """The probability that a value of the first is above one of the second; NaN if one is empty."""
    if not len(first) or not len(second):
        return float("nan")
    return float(scipy.stats.mannwhitneyu(first, second).statistic / (len(first) * len(second)))


def unit_means(
    trace: Trace, values: Float[np.ndarray, "L N"]
) -> tuple[Float[np.ndarray, "L U"], Int[np.ndarray, " U"]]:
    """Means of each unit, and the kind of each."""
    starts = np.flatnonzero(np.diff(trace.units, prepend=trace.units[0] - 1))
    sums = np.add.reduceat(values, starts, axis=1)
    return sums / np.diff(starts, append=values.shape[1]), trace.kinds[starts]


def local(values: Float[np.ndarray, "L N"]) -> Float[np.ndarray, "L N"]:
    """Values less the mean of those around."""
    return values - scipy.ndimage.uniform_filter1d(values, AROUND, axis=1, mode="nearest")


def steps(values: Float[np.ndarray, " N"], size: int = STEP) -> Float[np.ndarray, " N"]:
    """How much the mean of the ``size`` values from each place on differs from those before it."""
    total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    at = np.arange(len(values))
    before, after = np.maximum(at - size, 0), np.minimum(at + size, len(values))
    left = (total[at] - total[before]) / np.maximum(at - before, 1)
    right = (total[after] - total[at]) / np.maximum(after - at, 1)
    return np.where(at >= 1, np.abs(right - left), 0.0)


def peaks(values: Float[np.ndarray, " N"], count: int, apart: int) -> Int[np.ndarray, " C"]:
    """Places of the ``count`` largest values, none within ``apart`` of a larger one."""
    found: list[int] = []
    for place in np.argsort(-values, kind="stable"):
        if len(found) == count:
            break
        if all(abs(place - other) > apart for other in found):
            found.append(int(place))
    return np.sort(np.array(found, int))


def matched(
    found: Int[np.ndarray, " F"], true: Int[np.ndarray, " T"], within: int
) -> tuple[float, float]:
    """The shares of true places that have a found one near, and of found ones near a true one."""
    near = np.abs(found[:, None] - true[None]) <= within
    return float(near.any(0).mean()), float(near.any(1).mean()) if len(found) else 0.0


def by_lot(
    count: int, length: int, true: Int[np.ndarray, " T"], within: int, seed: int = 0
) -> tuple[float, float]:
    """What as many places by lot would reach, in the mean."""
    rng = np.random.default_rng(seed)
    draws = [
        matched(rng.choice(length - 1, min(count, length - 1), replace=False) + 1, true, within)
        for _ in range(DRAWS)
    ]
    return tuple(float(x) for x in np.mean(draws, axis=0))


def kinds_found(
    means: Sequence[Float[np.ndarray, "L U"]], kinds: Sequence[Int[np.ndarray, " U"]]
) -> dict[str, dict]:
    """``kinds`` of the module's docstring, a pair of kinds after the other."""

    def of(layer: int, pair: tuple[int, int], chosen: Sequence[int]) -> float:
        values = np.concatenate([means[i][layer] for i in chosen])
        named = np.concatenate([kinds[i] for i in chosen])
        return above(values[named == pair[0]], values[named == pair[1]])

    everything = range(len(means))
    rng = np.random.default_rng(0)
    found = {}
    for pair in PAIRS:
        layers = [of(layer, pair, everything) for layer in range(len(means[0]))]
        chosen, rest = everything[::2], everything[1::2]
        best = int(np.nanargmax([abs(of(n, pair, chosen) - 0.5) for n in range(len(layers))]))
        drawn = [of(best, pair, rng.choice(rest, len(rest))) for _ in range(DRAWS)]
        found[f"{KINDS[pair[0]]} above {KINDS[pair[1]]}"] = {
            "layers": layers,
            "best_layer": best,
            "held_out": of(best, pair, rest),
            "interval": np.nanpercentile(drawn, [2.5, 97.5]).tolist(),
        }
    return found


def attention_of(
    lm: kvjax.LanguageModel, ids: Sequence[int], every: int = 1024, queries: int = 64
) -> Float[np.ndarray, " N"]:
    """Mean attention to each token, over heads and layers, of the queries that end its part.

    Args:
        lm: the model.
        ids: prompt and answer, read with the full cache.
        every: tokens of a part.
        queries: the last ones of a part.
    """
    tokens = np.zeros((1, bucket(len(ids))), np.int32)
    tokens[0, : len(ids)] = ids
    ends = [*range(every, len(ids), every), len(ids)]
    asked = np.array([np.maximum(np.arange(end - queries, end), 0) for end in ends])
    found = _attention(lm.model, jnp.asarray(tokens), jnp.asarray(asked))
    part = np.minimum(np.arange(len(ids)) // every, len(ends) - 1)
    return np.asarray(found)[part, np.arange(len(ids))]


@jax.jit
def _attention(model, tokens: Int[Array, "1 N"], asked: Int[Array, "P R"]) -> Float[Array, "P N"]:
    config = model.config
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]

    def attend(index, cache, q, k, v, sinks):
        window = config.windows[index]
        groups = k.shape[2]
        some = q[0, asked].reshape(*asked.shape, groups, -1, q.shape[-1])
        logits = einsum_float32("prhgd,nhd->prhgn", some, k[0]) * config.scale
        seen = causal_mask(
            asked, jnp.broadcast_to(positions, (len(asked), tokens.shape[1])), window
        )
        logits = jnp.where(seen[:, :, None, None], logits, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1).mean((1, 2, 3))
        out, lse = causal_attention(q, k, v, positions, config.scale, window)
        return add_sinks(out, lse, sinks).astype(q.dtype), weights

    _, weights = model(tokens, positions, attend, (None,) * config.num_layers)
    return jnp.stack(weights).mean(0)


def borders_found(
    traces: Sequence[Trace],
    sparsity: Sequence[Float[np.ndarray, "L N"]],
    attention: Sequence[Float[np.ndarray, " N"]],
    newlines: Sequence[Int[np.ndarray, " M"]],
    within: int,
) -> dict[str, dict]:
    """``borders`` of the module's docstring."""
    true = [trace.borders() for trace in traces]

    def by_layer(layer: int, chosen: Sequence[int]) -> list[Int[np.ndarray, " C"]]:
        return [peaks(steps(sparsity[i][layer]), len(true[i]), STEP) for i in chosen]

    def recall(layer: int) -> float:
        chosen = range(0, len(traces), 2)
        pairs = zip(by_layer(layer, chosen), chosen, strict=True)
        return statistics.fmean(matched(found, true[i], within)[0] for found, i in pairs)

    best = max(range(len(sparsity[0])), key=recall)
    rest = range(1, len(traces), 2)
    jumps = [
        peaks(np.abs(np.diff(one, prepend=one[0])), len(borders), within)
        for one, borders in zip(attention, true, strict=True)
    ]
    ways = {
        "newline": (range(len(traces)), newlines),
        "attention": (range(len(traces)), jumps),
        "sparsity": (rest, by_layer(best, rest)),
    }
    found = {}
    for name, (chosen, places) in ways.items():
        if name != "sparsity":
            places = [places[i] for i in chosen]
        pairs = list(zip(places, chosen, strict=True))
        real = [matched(place, true[i], within) for place, i in pairs]
        lots = [by_lot(len(place), len(traces[i].answer), true[i], within, i) for place, i in pairs]
        (recall_, precision), (recall_lot, precision_lot) = np.mean(real, 0), np.mean(lots, 0)
        found[name] = {
            "places": statistics.fmean(len(place) for place in places),
            "found": float(recall_),
            "right": float(precision),
            "found_by_lot": float(recall_lot),
            "right_by_lot": float(precision_lot),
        }
    found["sparsity"]["layer"] = best
    return found


def measure(lm: kvjax.LanguageModel, traces: Sequence[Trace], within: int) -> dict:
    """Everything about some traces, which are read one after the other."""
    flags = newline_flags(lm.tokenizer.texts())
    sparsity, attention, newlines = [], [], []
    for number, trace in enumerate(traces, start=1):
        print(f"{number}/{len(traces)} {trace.name}", file=sys.stderr)
        sparsity.append(record(lm, trace.prompt, trace.answer))
        ids = [*trace.prompt, *trace.answer]
        attention.append(attention_of(lm, ids)[len(trace.prompt) :])
        broken = breaks(jnp.asarray(flags[np.array(trace.answer)][None]))[0]
        newlines.append(np.flatnonzero(np.asarray(broken)) + 1)
    parts = [unit_means(*one) for one in zip(traces, sparsity, strict=True)]
    means, kinds = zip(*parts, strict=True)
    flat = [unit_means(trace, local(x))[0] for trace, x in zip(traces, sparsity, strict=True)]
    named = np.concatenate(kinds)
    return {
        "traces": len(traces),
        "tokens": sum(len(trace.answer) for trace in traces),
        "units": {kind: int((named == i).sum()) for i, kind in enumerate(KINDS)},
        "borders": sum(len(trace.borders()) for trace in traces),
        "sparsity": {
            kind: np.concatenate([m[:, k == i] for m, k in parts], 1).mean(1).tolist()
            for i, kind in enumerate(KINDS)
        },
        "kinds": kinds_found(means, kinds),
        "local": kinds_found(flat, kinds),
        "borders_found": borders_found(traces, sparsity, attention, newlines, within),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=pathlib.Path, help="default: SmolLM2")
    parser.add_argument("--levels", type=int, nargs="+", default=[], help="of the reasoner")
    parser.add_argument("--problems", type=int, default=16, help="of each level and file, at most")
    parser.add_argument("--traces", type=pathlib.Path, nargs="+", default=[], help="JSON lines")
    parser.add_argument("--tokens", type=int, default=4096, help="of a trace of a file, at most")
    parser.add_argument("--within", type=int, default=4, help="tokens between place and border")
    parser.add_argument("--commit", help="of the code, where this runs outside a checkout")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args(argv)
    lm = kvjax.load(args.model, dtype="float32") if args.model else small_model()
    sources = {
        f"reasoner {level}": list(of_reasoner(level, args.problems)) for level in args.levels
    }
    sources |= {path.stem: list(of_file(path, lm, args.tokens)) for path in args.traces}
    if not sources:
        parser.error("nothing to read: pass --levels or --traces")
    result = {"run": run_record(args.commit), "model": pathlib.Path(lm.source).name, "results": {}}
    for name, traces in sources.items():
        some = list(itertools.islice(traces, args.problems))
        found = result["results"][name] = measure(lm, some, args.within)
        write_json(args.out, result)
        print(f"{name}: {found['tokens']:,} tokens, {found['borders']} borders, {found['units']}")
        for way, pair in itertools.product(("kinds", "local"), found["kinds"]):
            one = found[way][pair]
            low, high = one["interval"]
            print(
                f"  {way}, {pair}: layer {one['best_layer']}, held out {one['held_out']:.2f} "
                f"({low:.2f} to {high:.2f}), all layers "
                + " ".join(f"{value:.2f}" for value in one["layers"])
            )
        for way, one in found["borders_found"].items():
            print(
                f"  {way}: finds {one['found']:.0%} (by lot {one['found_by_lot']:.0%}), "
                f"{one['right']:.0%} right (by lot {one['right_by_lot']:.0%}), "
                f"{one['places']:.0f} places"
            )


if __name__ == "__main__":
    main()
