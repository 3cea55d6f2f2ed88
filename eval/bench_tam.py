"""TAM's parts, each switched alone, on real text; and what a compaction costs on a GPU.

    python -m kvjax.eval.bench_tam quality --text FILE --out eval/results/tam_quality.json
    python -m kvjax.eval.bench_tam time --out eval/results/tam_time.json

``quality``: SmolLM2-135M, float32, rows of consecutive tokens of FILE, read as ``bench_recipes``
reads them; what comes after the prompt is scored against the full cache. Budgets are shares of the
row's tokens, the same number of slots a head for every variant, in bfloat16. "periodic" compacts
every ``--every`` tokens, "once" when three quarters of the row have been read; what comes after
that alone is scored then.

``time``: Qwen3-4B's shape, one row of ``--tokens`` random keys and values in bfloat16 pages, to a
tenth. The whole maintenance of all layers is timed once it is compiled, with attention matching,
and with the selection alone.
"""

import argparse
import dataclasses
import math
import pathlib
import re
import statistics
import time
from collections.abc import Iterator

import jax
import numpy as np

from kvjax import recipes
from kvjax.compare import compare, reference
from kvjax.compress.selectors import HighestAttention, Random, SegmentQuotas
from kvjax.decoding.chunk import decode_chunk
from kvjax.decoding.maintain import maintain
from kvjax.errors import UsageError
from kvjax.eval.bench_thinkv import QWEN3_4B
from kvjax.eval.filled import filled, first
from kvjax.eval.random_model import random_model
from kvjax.eval.record import run_record, write_json
from kvjax.eval.text import (
    add_slice_arguments,
    add_text_arguments,
    model_of,
    record_of_text,
    rows_of,
)
from kvjax.matching import AttentionMatching
from kvjax.models.config import ModelConfig
from kvjax.recipes import Recipe


def parts(every: int, once: bool) -> Iterator[tuple[str, Recipe]]:
    """What is changed, and the recipe, with the prompt kept too; budgets are set later."""
    for name, recipe in _parts(every, once):
        yield name, recipe
        yield f"{name}, prompt kept", dataclasses.replace(recipe, protect_prompt=True)


def _parts(every: int, once: bool) -> Iterator[tuple[str, Recipe]]:
    common = {"every": every, "once": once, "codec": "bf16"}
    faithful = AttentionMatching(mode="faithful")
    scalar = AttentionMatching(fit_bias="scalar", fit_values=False)

    def quotas(**options) -> SegmentQuotas:
        return dataclasses.replace(recipes.tam().selector, **options)

    yield "recency", recipes.streaming(**common)
    yield "random", recipes.random(**common)
    yield "random keys, fitted", recipes.tam(**common, selector=Random())
    yield "eviction", recipes.pam(**common, compactor=None)
    yield "eviction by quotas", recipes.tam(**common, compactor=None)
    yield "one bias for all", recipes.pam(**common, compactor=scalar)
    yield "biases alone", recipes.pam(**common, compactor=AttentionMatching(fit_values=False))
    yield "values alone", recipes.pam(**common, compactor=AttentionMatching(fit_bias=False))
    yield "PAM", recipes.pam(**common)
    yield "PAM, faithful", recipes.pam(**common, compactor=faithful)
    yield "TAM", recipes.tam(**common)
    yield "TAM, faithful", recipes.tam(**common, compactor=faithful)
    yield "TAM without pivotal tokens", recipes.tam(**common, selector=quotas(pivotal=math.inf))
    yield "TAM without quotas", recipes.tam(**common, selector=quotas(quota="none"))
    yield "TAM, quotas by size", recipes.tam(**common, selector=quotas(quota="size"))
    yield "TAM, segments by attention", recipes.tam(**common, selector=quotas(by="attention"))
    yield "TAM, mean attention", recipes.tam(**common, selector=quotas(score="mean"))
    yield "SnapKV's keys, fitted", recipes.snapkv_decode(**common, compactor=AttentionMatching())
    yield "PAM, pooled", recipes.pam(**common, selector=HighestAttention(kernel=7))


def quality(args: argparse.Namespace) -> None:
    lm = model_of(args)
    tokens = rows_of(args, lm)
    expected = reference(lm, tokens, prompt_tokens=args.prompt_tokens)
    found = {**record_of_text(args, lm), "every": args.every, "results": []}
    print(f"{'':9} {'ratio':>6} {'':28} {'KL':>9} {'p99':>9} {'top-1':>6} {'live':>6} {'s':>5}")
    trigger = args.tokens * 3 // 4 - args.prompt_tokens
    trigger -= trigger % 16
    variants = [
        (when, share, name, dataclasses.replace(recipe, budget=round(share * args.tokens)))
        for when, every in (("periodic", args.every), ("once", trigger))
        for share in args.shares
        for name, recipe in parts(every, when == "once")
        if re.fullmatch(args.only, name)
    ]
    for when, share, name, recipe in variants[args.start :: args.step]:
        start = time.perf_counter()
        about = {"when": when, "share": share, "name": name}
        try:
            result = compare(lm, expected, recipe=recipe, by_tick=True)
        except UsageError as error:
            print(f"{when:9} {share:6} {name:28} refused: {error}", flush=True)
            found["results"].append({**about, "refused": str(error)})
            continue
        kl = np.asarray(result.kl)
        if when == "once":  # nothing differs before it
            kl = kl[:, trigger:]
        seconds = time.perf_counter() - start
        print(
            f"{when:9} {share:6} {name:28} {kl.mean():9.2e} {np.quantile(kl, 0.99):9.2e} "
            f"{result.top1_agreement:6.1%} {result.live_tokens['max']:6.0f} {seconds:5.0f}",
            flush=True,
        )
        own = {"kl": float(kl.mean()), "kl_rows": kl.mean(1).tolist(), "seconds": seconds}
        found["results"].append({**about, **result.as_dict(), **own})
        if args.out:
            write_json(args.out, found)


def measure_time(args: argparse.Namespace) -> None:
    config = ModelConfig.from_hf({**QWEN3_4B, "num_hidden_layers": args.model_layers})
    budget, tick = -(-args.tokens // 10), 16
    every = (args.tokens - budget) // tick * tick
    common = {"budget": budget, "every": every, "codec": "bf16"}
    faithful = AttentionMatching(mode="faithful")
    timed = {
        "TAM, faithful": recipes.tam(**common, compactor=faithful),
        "TAM": recipes.tam(**common),
        "PAM": recipes.pam(**common),
        "selection and quotas alone": recipes.tam(**common, compactor=None),
        "moving tokens alone": recipes.tam(**common, compactor=None),
    }
    results = []
    for name, recipe in timed.items():
        done = every if name != "moving tokens alone" else every + tick
        raw = [_compaction(config, recipe, args.tokens, done, i) for i in range(args.repeats + 1)]
        median = statistics.median(raw[1:])
        print(f"{name:28} {median:9.1f} ms, {raw[0] / 1000:.1f} s with compilation", flush=True)
        results.append({"name": name, "ms": median, "raw_ms": raw})
    step = _step(config, recipes.tam(**common), args.tokens)
    print(f"{'a decode step':28} {step:9.2f} ms", flush=True)
    share = results[0]["ms"] / (results[0]["ms"] + 1024 * step)
    print(f"{'of the time, every 1,024':28} {share:9.1%}", flush=True)
    if args.out:
        shape = {**QWEN3_4B, "num_hidden_layers": args.model_layers}
        write_json(
            args.out,
            {
                "run": run_record(args.commit),
                "shape": shape,
                "tokens": args.tokens,
                "budget": budget,
                "step_ms": step,
                "share_of_time": share,
                "results": results,
            },
        )


def _state(config: ModelConfig, recipe: Recipe, tokens: int, seed: int):
    """One row that holds all of its tokens, with queries to ask."""
    state = filled(config, recipe, 1, tokens, 64, [first(tokens - recipe.window)])
    keys = jax.random.split(jax.random.key(seed), config.num_layers)
    layers = tuple(
        dataclasses.replace(layer, queries=_normal(key, layer.queries))
        for layer, key in zip(state.cache.layers, keys, strict=True)
    )
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=layers))


@jax.jit
def _normal(key, like):
    return jax.random.normal(key, like.shape, like.dtype)


def _compaction(config, recipe: Recipe, tokens: int, done: int, seed: int) -> float:
    """Milliseconds of the maintenance of all layers."""
    state = jax.block_until_ready(_state(config, recipe, tokens, seed))
    start = time.perf_counter()
    jax.block_until_ready(
        maintain(state, np.ones(1, bool), config=config, recipe=recipe, done=done)
    )
    return 1000 * (time.perf_counter() - start)


def _step(config, recipe: Recipe, tokens: int) -> float:
    """Milliseconds of a decode step once the row is compacted."""
    model = random_model(config)
    state, halt, times = _state(config, recipe, tokens, 0), np.zeros(1, bool), []
    state = maintain(state, ~halt, config=config, recipe=recipe, done=recipe.every)
    for _ in range(4):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(
            decode_chunk(model, state, None, halt, steps=16, stop_ids=(), recipe=recipe)
        )
        times.append(1000 * (time.perf_counter() - start) / 16)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", help="of the code, where this runs outside a checkout")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the figures")
    what = parser.add_subparsers(required=True)
    text = what.add_parser("quality")
    add_text_arguments(text, 1, 4608, 256)
    text.add_argument("--every", type=int, default=1024)
    text.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    text.add_argument("--only", default=".*", help="variants whose name this expression matches")
    add_slice_arguments(text)
    text.set_defaults(run=quality)
    gpu = what.add_parser("time")
    gpu.add_argument("--tokens", type=int, default=4096)
    gpu.add_argument("--model-layers", type=int, default=36)
    gpu.add_argument("--repeats", type=int, default=5)
    gpu.set_defaults(run=measure_time)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
