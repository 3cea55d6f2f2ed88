"""Which kinds of thought do methods keep, where the kinds are known?

    python -m kvjax.eval.bench_kept --model eval/models/reasoner --levels 1000 --out FILE
    python -m kvjax.eval.bench_kept --traces FILE.jsonl --tokens 1024 --out FILE

Traces are those of ``kvjax.eval.bench_thoughts``. Each is read into a cache as if it had been
decoded, and then the tokens are counted that the cache still holds: ``kept`` is their share of a
kind's tokens, mean over layers and KV heads. Every answer is cut to the same number of tokens, one
more than a multiple of ``--every``, so that a selection has just been. The prompt stays, and beside
it a budget of ``--share`` of the answer's tokens, which have 16 bits except for thinkv's 4 and 2
(how many tokens there are is what is compared, and not their bytes).

``chance`` is the share of all tokens of the answer that the same cache holds: what each kind would
keep if as many had been drawn by lot, at the same bytes. But methods prefer the last tokens, and
kinds have their places in a trace. So each half of the answer has figures and a chance of its own;
and ``same_age`` is the share that is held of the tokens at the same places (and up to 16 before and
behind) in the other traces, whatever their kind. ``above_chance`` and ``above_age`` are kept over
these, minus 1, with the interval that 95 % of the draws of the traces give.

"thinkv, told" is thinkv that is told the kind of each of its segments of 128 tokens: the most
frequent one. The others know of no kinds ("thinkv" where no calibration tells them apart).
"""

import argparse
import dataclasses
import itertools
import pathlib
import statistics
import sys
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
import scipy.ndimage
from jaxtyping import Bool, Float, Int

import kvjax
from kvjax import recipes
from kvjax.cache.packed import Packed, pack_row
from kvjax.cache.plan import plan
from kvjax.decoding.chunk import DecodeState
from kvjax.decoding.empty import empty_cache
from kvjax.decoding.prompts import prefill_prompts
from kvjax.decoding.resume import read_on
from kvjax.errors import UsageError
from kvjax.eval.record import run_record, write_json
from kvjax.eval.text import small_model
from kvjax.eval.traces import Trace, of_file, of_reasoner
from kvjax.recipes import Recipe
from kvjax.thoughts import KINDS, Given
from kvjax.thoughts.segmenters import SEGMENT

METHODS = ("thinkv", "thinkv, told", "tam", "pam", "rkv", "random", "streaming")
DRAWS = 1000
NEAR = 16
"""Tokens on each side that are as old."""
PARTS = ("all", "first half", "second half")


def held(packed: Packed, layers: int, tokens: int) -> Bool[np.ndarray, "L H N"]:
    """Which of a row's tokens each KV head of each layer holds.

    Args:
        packed: the row, of keys and values.
        layers: of the model.
        tokens: that the row has read.
    """
    heads = len(packed["0.0.pages"])
    found = np.zeros((layers, heads, tokens), bool)
    for place in [name.removesuffix(".pos") for name in packed if name.endswith(".pos")]:
        pos = packed[f"{place}.pos"]
        head = np.repeat(np.arange(heads), packed[f"{place}.pages"])[:, None]
        live = pos >= 0
        found[int(place.partition(".")[0]), np.broadcast_to(head, pos.shape)[live], pos[live]] = (
            True
        )
    return found


def read(lm: kvjax.LanguageModel, trace: Trace, recipe: Recipe) -> Bool[np.ndarray, "L H N"]:
    """Which tokens of the answer are held once it has been read as if it had been decoded.

    Raises:
        UsageError: a recipe that cannot work.
        CapacityError: it does not fit the memory, or the model's context.
    """
    planned = plan(
        lm.config,
        recipe,
        batch_size=1,
        prompt_tokens=len(trace.prompt),
        max_new_tokens=len(trace.answer),
        dtype=lm.dtype,
        parameter_bytes=lm.nbytes,
    )
    planned.check()
    cache = empty_cache(lm, planned.geometry)
    cache, _ = prefill_prompts(lm, cache, [trace.prompt], planned.recipe, 0)
    one = jnp.ones(1, jnp.int32)
    state = DecodeState(cache, one, one, jnp.ones(1, bool))
    state, _ = read_on(lm, state, trace.answer, planned.recipe, 0, lambda read: True)
    tokens = len(trace.prompt) + len(trace.answer)
    return held(pack_row(state.cache), lm.config.num_layers, tokens)[..., len(trace.prompt) :]


def methods(trace: Trace, every: int, budget: int, prompt: int) -> Iterator[tuple[str, Recipe]]:
    """What is compared, by name.

    Args:
        trace: whose kinds a method may be told.
        every: tokens between two selections.
        budget: tokens of the answer.
        prompt: tokens of a prompt; one number for all traces, so that they share programs.
    """
    own = {"budget": budget + prompt, "protect_prompt": True}
    yield "thinkv", recipes.thinkv(budget)
    yield "thinkv, told", recipes.thinkv(budget, segmenter=Given(told(trace)))
    for method in (recipes.tam, recipes.pam, recipes.rkv):
        yield method.__name__, method(**own, every=every)
    for method in (recipes.random, recipes.streaming):
        yield method.__name__, method(**own)


def told(trace: Trace) -> str:
    """The most frequent known kind of each of ThinKV's segments, the first of equally frequent."""
    parts = np.split(trace.kinds, range(SEGMENT, len(trace.kinds), SEGMENT))
    return "".join(KINDS[np.bincount(part[part >= 0], minlength=1).argmax()] for part in parts)


def cut(trace: Trace, tokens: int) -> Trace:
    """The trace's first tokens of the answer."""
    own = {name: getattr(trace, name)[:tokens] for name in ("answer", "kinds", "units")}
    return dataclasses.replace(trace, **own)


def same_age(shares: Float[np.ndarray, "T N"]) -> Float[np.ndarray, "T N"]:
    """Of every token, the share held of those of the same age in the other traces (one or more)."""
    around = scipy.ndimage.uniform_filter1d(shares, 2 * NEAR + 1, axis=1, mode="nearest")
    return (around.sum(0) - around) / (len(shares) - 1)


def counts(
    kinds: Int[np.ndarray, "T N"], shares: Float[np.ndarray, "T N"]
) -> Float[np.ndarray, "T 3 K 3"]:
    """Of each trace, part and kind: the tokens, how many are held, and how many of the same age."""
    tokens = np.stack([np.ones_like(shares), shares, same_age(shares)])
    second = np.arange(kinds.shape[1]) >= kinds.shape[1] // 2
    parts = np.stack([np.ones_like(second), ~second, second])
    of_kind = kinds[:, None] == np.arange(len(KINDS))[:, None]
    return np.einsum("ctn,pn,tkn->tpkc", tokens, parts, of_kind)


def figures(total: Float[np.ndarray, "T 3 K 3"]) -> dict[str, dict]:
    """The figures of the module's docstring, of the counts of some traces."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(total), (DRAWS, len(total)))
    sums = np.concatenate([total.sum(0)[None], total[drawn].sum(1)])  # what there is, then draws
    tokens, kept, expected = np.moveaxis(sums, 3, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = kept.sum(2) / tokens.sum(2)
        above = {
            "above_chance": kept / tokens / chance[..., None] - 1,
            "above_age": kept / expected - 1,
        }
    found = {}
    for part, name in enumerate(PARTS):
        of_kinds = {}
        for k, kind in enumerate(KINDS):
            if count := int(tokens[0, part, k]):
                of_kinds[kind] = {
                    "tokens": count,
                    "kept": float(kept[0, part, k] / count),
                    "same_age": float(expected[0, part, k] / count),
                }
                for key, ratio in above.items():
                    of_kinds[kind][key] = _with_interval(ratio[:, part, k])
        found[name] = {"chance": float(chance[0, part]), "kinds": of_kinds}
    return found


def _with_interval(values: Float[np.ndarray, " D"]) -> list[float] | None:
    """The first, and between what 95 % of the others lie; None where nothing was to be held."""
    if not np.isfinite(values[0]):
        return None
    drawn = values[1:][np.isfinite(values[1:])]
    return [float(values[0]), *np.percentile(drawn, [2.5, 97.5]).tolist()]


def measure(
    lm: kvjax.LanguageModel,
    traces: Sequence[Trace],
    names: Sequence[str],
    every: int,
    share: float,
) -> dict[str, dict]:
    """The figures of the named methods on some traces, whose answers are equally long."""
    prompt = round(statistics.fmean(len(trace.prompt) for trace in traces))
    budget = round(share * len(traces[0].answer))
    kinds = np.array([trace.kinds for trace in traces])
    shares: dict[str, list] = {}
    for number, trace in enumerate(traces, start=1):
        for name, recipe in methods(trace, every, budget, prompt):
            if name not in names:
                continue
            print(f"{number}/{len(traces)} {trace.name}: {name}", file=sys.stderr)
            shares.setdefault(name, []).append(read(lm, trace, recipe).mean((0, 1)))
    return {name: figures(counts(kinds, np.array(each))) for name, each in shares.items()}


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=pathlib.Path, help="default: SmolLM2")
    parser.add_argument("--levels", type=int, nargs="+", default=[], help="of the reasoner")
    parser.add_argument("--traces", type=pathlib.Path, nargs="+", default=[], help="JSON lines")
    parser.add_argument("--problems", type=int, default=4, help="of each level and file, at most")
    parser.add_argument("--tokens", type=int, default=896, help="of an answer, about")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--every", type=int, default=128, help="tokens between two selections")
    parser.add_argument("--share", type=float, default=0.25, help="of the answer's tokens")
    parser.add_argument("--commit", help="of the code, where this runs outside a checkout")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args(argv)
    tokens = args.tokens // args.every * args.every + 1
    lm = kvjax.load(args.model, dtype="float32") if args.model else small_model()
    sources = {f"reasoner {level}": of_reasoner(level, 4 * args.problems) for level in args.levels}
    sources |= {path.stem: of_file(path, lm, lm.config.context_length) for path in args.traces}
    if not sources:
        parser.error("nothing to read: pass --levels or --traces")
    result = {
        "run": run_record(args.commit),
        "model": pathlib.Path(lm.source).name,
        "every": args.every,
        "share": args.share,
        "tokens": tokens,
        "results": {},
    }
    for source, all_of_it in sources.items():
        long = (cut(trace, tokens) for trace in all_of_it if len(trace.answer) >= tokens)
        traces = list(itertools.islice(long, args.problems))
        if len(traces) < 2:  # their ages are compared
            parser.error(
                f"{source}: {len(traces)} of the answers looked at have {tokens} tokens, and two "
                "are needed: pass fewer --tokens, or more --problems"
            )
        try:
            found = measure(lm, traces, args.methods, args.every, args.share)
        except UsageError as error:  # a prompt that is longer than its budget, say
            parser.error(f"--share {args.share}: {error}")
        result["results"][source] = {"traces": [trace.name for trace in traces], "methods": found}
        write_json(args.out, result)
        for (name, one), part in itertools.product(found.items(), PARTS):
            print(f"{source}, {name}, {part}: {described(one[part])}")


def described(found: dict) -> str:
    """A part's figures, for people."""
    cells = [f"chance {found['chance']:.3f}"]
    for kind, one in found["kinds"].items():
        cells.append(f"{kind} {one['kept']:.3f}")
        for key in ("above_chance", "above_age"):
            if one[key] is not None:
                cells[-1] += f", {key} " + "{:+.0%} ({:+.0%} to {:+.0%})".format(*one[key])
    return "; ".join(cells)


if __name__ == "__main__":
    main()
