"""ThinKV's parts, each switched alone, at equal bytes; and what its work costs on a GPU.

    python -m kvjax.eval.bench_thinkv quality --text FILE --out eval/results/thinkv_quality.json
    python -m kvjax.eval.bench_thinkv overhead --out eval/results/thinkv_overhead.json

``quality``: SmolLM2-135M, float32, rows of consecutive tokens of FILE, read as ``bench_recipes``
reads them; every variant has the largest budget whose row takes no more than 1/``--share`` of a
bare bfloat16 cache, all buffers counted. Where the model has no calibration that tells thoughts
apart, thresholds are the tertiles of the text's own sparsity in the layers named by ``--layers``:
a stand-in, with which kinds are as common as one another. The paper's codes share scales, so that
their slots come free in groups: that variant has the default's budget, and more bytes.

``overhead``: Qwen3-4B's shape with random weights in bfloat16. Rows decode until their budget is
full; then the times of the chunks and of the maintenance after them are taken over whole segments.
Telling thoughts apart and evicting is what the maintenance at a segment's border takes beyond that
of an ordinary tick, which moves tokens into pages. One more segment is timed as a whole, without
waiting for any part of it.
"""

import argparse
import dataclasses
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.cache import init_cache
from kvjax.cache.plan import plan
from kvjax.compare import compare, reference
from kvjax.decoding.chunk import decode_chunk, start_decoding
from kvjax.decoding.maintain import maintain
from kvjax.decoding.prefill import prefill_chunk
from kvjax.errors import UsageError
from kvjax.eval.bench_recipes import PROTECTED, Planner, variants
from kvjax.eval.random_model import random_model
from kvjax.eval.record import run_record, write_json
from kvjax.eval.text import (
    add_slice_arguments,
    add_text_arguments,
    model_of,
    record_of_text,
    rows_of,
)
from kvjax.models.config import ModelConfig
from kvjax.recipes import Recipe, thinkv
from kvjax.thoughts import KINDS, Given, Retention, Segmenter, Sparsity
from kvjax.thoughts.calibration import Calibration
from kvjax.thoughts.record import record

QWEN3_4B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
}
BASELINES = (PROTECTED, "random", "streaming", "h2o", "snapkv_decode", "rkv")


@dataclasses.dataclass(frozen=True)
class Sampled:
    """The sparsity of the text's first row, and what tells its thoughts apart."""

    sparsity: np.ndarray
    segmenter: Sparsity

    def kinds(self, every: int) -> str:
        """The kind of each segment, by the sparsity of the full cache at its start."""
        at = self.sparsity[list(self.segmenter.layers)].mean(0)[::every]
        found = self.segmenter(jnp.asarray(at), jnp.zeros(len(at), jnp.int32))
        return "".join(KINDS[kind] for kind in np.asarray(found))


def sampled(lm: kvjax.LanguageModel, row: np.ndarray, prompt: int, layers: list[int]) -> Sampled:
    sparsity = record(lm, row[:prompt].tolist(), row[prompt:].tolist())
    found = Calibration.shipped(lm.fingerprint)
    if found is not None and found.thresholds is not None:
        return Sampled(sparsity, Sparsity(found.layers, found.thresholds))
    low, high = np.quantile(sparsity[layers].mean(0), (1 / 3, 2 / 3))
    return Sampled(sparsity, Sparsity(tuple(layers), (float(low), float(high))))


def ablations(text: Sampled) -> Iterator[tuple[str, str, Recipe]]:
    """What is changed, to what, and the recipe."""
    own = text.segmenter

    def of(segmenter: Segmenter = own, keep: dict | None = None, **options) -> Recipe:
        return thinkv(segmenter=segmenter, retention=Retention(**keep or {}), **options)

    yield "default", "", of()
    yield "paper", "", thinkv(segmenter=own, paper=True)
    yield "one kind of thought", "4 bits", thinkv()
    for chooser in ("strided", "random", "attention"):
        kept = Retention(chooser=chooser)
        yield "one kind of thought", f"tokens chosen {chooser}", thinkv(retention=kept)
    kept = Retention(shared=True)
    yield "one kind of thought", "tokens shared by the heads", thinkv(retention=kept)
    kinds = text.kinds(own.every)
    shuffled = "".join(random.Random(0).sample(kinds, len(kinds)))
    yield "labels", "shuffled", of(Given(shuffled))
    yield "labels", "periodic", of(Given(_periodic(kinds)))
    yield "labels", "for the past segment", of(dataclasses.replace(own, covers="past"))
    yield "labels", "without correction", of(dataclasses.replace(own, corrected=False))
    for chooser in ("strided", "random", "attention"):
        yield "tokens chosen", chooser, of(keep={"chooser": chooser})
    yield "tokens chosen", "shared by the heads", of(keep={"shared": True})
    for floor, schedule in ((0, (64, 32, 16, 8, 4, 0)), (8, (64, 32, 16, 8))):
        yield "floor", str(floor), of(keep={"schedule": schedule})
    for every in (32, 64, 256):
        yield "segment", f"{every} tokens", of(dataclasses.replace(own, every=every))
    for count in (1, 2):
        yield "layers", str(count), of(dataclasses.replace(own, layers=own.layers[:count]))
    for name, codecs in (
        ("R8 E4 T2", ("int8", "int4", "int2")),
        ("4 for all", ("int4",) * 3),
        ("k4v2 for all", ("k4v2",) * 3),
        ("16 for all", ("bf16",) * 3),
    ):
        yield "bits", name, of(thought_codecs=codecs)
    for name, options in (("16 bits", {"prompt_codec": "bf16"}), ("4", {"prompt_codec": "int4"})):
        yield "prompt", name, of(**options)
    yield "transition", "demotes at its end", of(keep={"at": "end"})
    yield "transition", "only the first of several", of(keep={"repeated": False})
    yield "transition", "demotes itself too", of(keep={"itself": True})
    yield "evicted tokens", "attended until overwritten", of(keep={"forget": False})


def _periodic(kinds: str) -> str:
    """A pattern with the same share of transitions, evenly spaced."""
    transitions = max(kinds.count("T"), 1)
    every = max(round(len(kinds) / transitions), 1)
    return "R" * (every - 1) + "T"


def quality(args: argparse.Namespace) -> None:
    lm = model_of(args)
    planner = Planner(lm, args.tokens, args.prompt_tokens)
    tokens = rows_of(args, lm)
    text = sampled(lm, tokens[0], args.prompt_tokens, args.layers)
    expected = reference(lm, tokens, prompt_tokens=args.prompt_tokens)
    found = {
        **record_of_text(args, lm),
        "share": args.share,
        "segmenter": dataclasses.asdict(text.segmenter),
        "kinds": text.kinds(text.segmenter.every),
        "results": [],
    }
    print(f"{'':20} {'':28} {'budget':>7} {'ratio':>6} {'KL':>9} {'p99':>9} {'top-1':>6} {'s':>5}")
    chosen = [
        ("baseline", name, recipe)
        for name in BASELINES
        for recipe, share in variants(name, ["int4"])
        if share == args.share
    ]
    chosen += ablations(text)
    own = planner.of_share(thinkv(segmenter=text.segmenter), args.share)
    for part, change, recipe in chosen[args.start :: args.step]:
        start = time.perf_counter()
        try:
            if part == "paper":  # whose slots come free in groups: the same tokens, more bytes
                recipe = dataclasses.replace(recipe, budget=own.budget)
            else:
                recipe = planner.of_share(recipe, args.share) or recipe
            result = compare(lm, expected, recipe=recipe, by_tick=True)
        except UsageError as error:
            print(f"{part:20} {change:28} refused: {error}", flush=True)
            found["results"].append({"part": part, "change": change, "refused": str(error)})
            continue
        ratio = planner(recipe).geometry.row_bytes / planner.full_bytes()
        seconds = time.perf_counter() - start
        print(
            f"{part:20} {change:28} {recipe.budget:7} {ratio:6.3f} {result.kl_mean:9.2e} "
            f"{result.kl_p99:9.2e} {result.top1_agreement:6.1%} {seconds:5.0f}",
            flush=True,
        )
        rows = np.asarray(result.kl).mean(1).tolist()
        about = {"part": part, "change": change, "row_ratio": ratio, "kl_rows": rows}
        found["results"].append({**about, "seconds": seconds, **result.as_dict()})
        if args.out:
            write_json(args.out, found)


def overhead(args: argparse.Namespace) -> None:
    config = ModelConfig.from_hf({**QWEN3_4B, "num_hidden_layers": args.model_layers})
    model = random_model(config)
    spread = [i * config.num_layers // 4 for i in range(4)]
    segmenter = Sparsity(tuple(spread), (args.low, args.high))
    recipe = thinkv(args.budget, segmenter=segmenter, retention=Retention())
    every, tick = segmenter.every, recipe.tick
    border = args.budget + every  # from here on every segment costs the others some tokens
    steps = border + every * (args.segments + 1)
    prompt, new = 32, steps + every + tick
    planned = plan(
        config,
        recipe,
        batch_size=args.batch,
        prompt_tokens=prompt,
        max_new_tokens=new,
        dtype=jnp.bfloat16,
        parameter_bytes=0,
    )
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (args.batch, prompt))
    logits = jnp.zeros((args.batch, config.vocab_size), jnp.float32)
    count = np.full(args.batch, prompt, np.int32)
    cache, logits = prefill_chunk(
        model,
        init_cache(planned.geometry),
        logits,
        tokens.astype(np.int32),
        count,
        recipe=recipe,
    )
    left = np.full(args.batch, new, np.int32)
    state, _ = start_decoding(cache, logits, None, left, stop_ids=())
    halt, compress = np.zeros(args.batch, bool), np.ones(args.batch, bool)
    times = []
    for done in range(0, steps, tick):
        state, kept = _timed(
            lambda s=state, d=done: maintain(s, compress, config=config, recipe=recipe, done=d)
        )
        (state, _), decoded = _timed(
            lambda s=state: decode_chunk(
                model, s, None, halt, steps=tick, stop_ids=(), recipe=recipe
            )
        )
        times.append({"done": done, "maintain_ms": kept, "chunk_ms": decoded})
        if done % every == 0:
            print(f"{done:6} steps, chunk {decoded:.1f} ms, maintenance {kept:.1f} ms", flush=True)
    start = time.perf_counter()
    for done in range(steps, steps + every, tick):  # as decoding does: nothing is waited for
        state = maintain(state, compress, config=config, recipe=recipe, done=done)
        state, _ = decode_chunk(model, state, None, halt, steps=tick, stop_ids=(), recipe=recipe)
    jax.block_until_ready(state)
    whole = 1000 * (time.perf_counter() - start) / every
    late = [entry for entry in times if entry["done"] >= border]
    at = {offset: [] for offset in range(0, every, tick)}
    for entry in late:
        at[entry["done"] % every].append(entry["maintain_ms"])
    each = {offset: statistics.median(found) for offset, found in at.items()}
    plain = statistics.median(each[offset] for offset in at if offset not in (0, recipe.window))
    extra = sum(max(each[offset] - plain, 0) for offset in (0, recipe.window))
    chunk = statistics.median(entry["chunk_ms"] for entry in late)
    segment = chunk * every / tick + plain * every / tick + extra
    result = {
        "batch": args.batch,
        "budget": args.budget,
        "step_ms": chunk / tick,
        "moving_ms_a_step": plain / tick,
        "whole_ms_a_step": whole,
        "thoughts_ms_a_segment": extra,
        "maintain_ms_by_offset": each,
        "share_of_thoughts": extra / segment,
        "share_of_moving": plain * every / tick / segment,
        "row_bytes": planned.geometry.row_bytes,
        "kinds": np.asarray(state.cache.thoughts.kind)[0].tolist(),
        "demoted": np.asarray(state.cache.thoughts.demoted)[0].tolist(),
        "raw": times,
    }
    print({name: value for name, value in result.items() if name not in ("raw", "kinds")})
    if args.out:
        write_json(
            args.out,
            {
                "run": run_record(args.commit),
                "shape": {**QWEN3_4B, "num_hidden_layers": args.model_layers},
                "results": [result],
            },
        )


def _timed(call: Callable):
    start = time.perf_counter()
    found = jax.block_until_ready(call())
    return found, 1000 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", help="of the code, where this runs outside a checkout")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the figures")
    what = parser.add_subparsers(required=True)
    text = what.add_parser("quality")
    add_text_arguments(text, 2, 2304, 256)
    text.add_argument("--share", type=int, default=8, help="of the full cache's bytes: 1/N")
    text.add_argument("--layers", type=int, nargs="+", default=[9, 13, 17, 21])
    add_slice_arguments(text)
    text.set_defaults(run=quality)
    gpu = what.add_parser("overhead")
    gpu.add_argument("--batch", type=int, default=64)
    gpu.add_argument("--budget", type=int, default=1024)
    gpu.add_argument("--segments", type=int, default=4, help="timed after the budget is full")
    gpu.add_argument("--model-layers", type=int, default=36)
    gpu.add_argument("--low", type=float, default=0.3)
    gpu.add_argument("--high", type=float, default=0.6)
    gpu.set_defaults(run=overhead)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
