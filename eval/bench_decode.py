"""Milliseconds a decode step takes at a model's shape, with random weights and a filled cache.

    python -m kvjax.eval.bench_decode --batch 1 8 32 128 --out eval/results/decode_h200.json
    python -m kvjax.eval.bench_decode --context 32000 --repeats 3 --methods thinkv --batch 1 256 0

Times ``decode_chunk``, the program that decoding calls, and the maintenance between chunks, over
whole periods of it, and sets them against the memory roofline: the bytes that a step must read
(weights, and the keys, values, scales and biases of live slots) over the bandwidth that the same
run measured, or for weights the operations over the products of matrices that an H200 reaches.
Rows begin at ``--context`` tokens, of which a method that evicts holds ``--budget``.
"rkv-gathered" is R-KV without pages, as its authors keep a cache (``kvjax.eval.gathered``). A
process' peak is of all that it has measured so far: give each method a process of its own.
"""

import argparse
import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax import recipes
from kvjax.cache import KVCache, held, plan
from kvjax.decoding.chunk import DecodeState, decode_chunk
from kvjax.decoding.maintain import maintain
from kvjax.eval import gathered
from kvjax.eval.filled import PROMPT, filled
from kvjax.eval.kernel_times import kernel_times
from kvjax.eval.random_model import random_model
from kvjax.eval.record import run_record, write_json
from kvjax.memory import device_memory, memory_in_use
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.recipes import Recipe
from kvjax.sharding import on, shards
from kvjax.thoughts import Sparsity
from pallas_kernels.paged_attention.api import Implementation

GATHERED = "rkv-gathered"
METHODS = ("full", "uniform", "rkv", GATHERED, "thinkv")
EVERY = recipes.rkv().every
PRODUCTS = 790e12  # operations a second of an H200's products of bfloat16, as PyTorch has them
MOST_KERNELS = 40
LARGEST = 0
"""As a batch size: as many rows as fit."""
_ROOM = 0.85  # of the memory that weights and cache may take; a step's temporaries need some
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def read_bandwidth() -> float:
    """Bytes a second of a sum over 8 GiB of bfloat16, the best of five."""
    array = jnp.ones((4, 1 << 30), jnp.bfloat16)
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    jax.block_until_ready(total(array))
    return array.nbytes / min(_seconds(lambda: total(array)) for _ in range(5))


def method_of(name: str, budget: int) -> Recipe:
    """A recipe as users get it, at a budget of so many tokens if it evicts."""
    if name == "full":
        return recipes.full()
    if name == "uniform":
        return recipes.uniform("int4")
    if name == "rkv":
        return recipes.rkv(budget=budget)
    return recipes.thinkv(budget, segmenter=Sparsity((3, 11, 19, 27), (0.3, 0.6)))


@dataclasses.dataclass(frozen=True)
class Timed:
    """What a run of whole periods took.

    Attributes:
        raw_ms: milliseconds a step, one for each period.
        upkeep_ms: of these, those of the maintenance between chunks, by the last period that does
            not count, in which every call was waited for.
        first_s: of the first period, compilation included.
        states: what each group of devices holds after it.
        kernels: of one more period, as ``kernel_times`` has them, if it was asked for.
    """

    raw_ms: list[float]
    upkeep_ms: float
    first_s: float
    states: list[DecodeState]
    kernels: list[dict] = dataclasses.field(default_factory=list)


def timed(
    config: ModelConfig,
    placed: Sequence[tuple[Mesh | None, Decoder]],
    recipe: Recipe,
    rows: int,
    context: int,
    repeats: int,
    warm: int = 3,
    kernel: Implementation | None = None,
    fill: Callable[..., DecodeState] = filled,
    profile: bool = False,
) -> Timed:
    """Time ``decode_chunk`` and the maintenance between chunks, over whole periods of it.

    Args:
        placed: groups of devices, each with the model and ``rows`` rows of its own.
        warm: periods before those that count: a command buffer is recorded in its second run.
        kernel: what computes attention, as ``kvjax.generate`` has it.
        fill: makes the state to begin with, as `filled` does.
        profile: also see which kernels take the time.
    """
    tick = recipe.tick
    ticks = _period(recipe) // tick
    steps = tick * ticks * (repeats + warm + profile)
    # Whole periods of decoding, so that maintenance falls where it would.
    begin = (context - PROMPT) // (tick * ticks) * tick * ticks
    context = PROMPT + begin
    states = []
    for mesh, _ in placed:
        with on(mesh):
            states.append(fill(config, recipe, rows, context, steps, tp=shards(mesh)))
    halt, compress = np.zeros(rows, bool), np.ones(rows, bool)
    raw, upkeep = [], 0.0

    def tick_of(group: int, done: int, watched: bool):
        nonlocal upkeep
        mesh, model = placed[group]
        state = states[group]
        with on(mesh):
            if not recipe.keeps_all:
                keep = functools.partial(
                    maintain, state, compress, config=config, recipe=recipe, done=done
                )
                if watched:
                    jax.block_until_ready(state)
                    began = time.perf_counter()
                    state = jax.block_until_ready(keep())
                    upkeep += time.perf_counter() - began
                else:
                    state = keep()
            states[group], output = decode_chunk(
                model, state, None, halt, steps=tick, stop_ids=(), recipe=recipe, kernel=kernel
            )
        return output

    def period(i: int):
        for j in range(ticks):
            done = begin + (i * ticks + j) * tick
            outputs = [tick_of(group, done, i == warm - 1) for group in range(len(placed))]
        return outputs

    start = time.perf_counter()
    for i in range(repeats + warm):
        seconds = _seconds(functools.partial(period, i))
        if i == 0:
            first_s = time.perf_counter() - start
        if i >= warm:
            raw.append(1000 * seconds / (tick * ticks))
    kernels = kernel_times(functools.partial(period, repeats + warm)) if profile else []
    return Timed(raw, 1000 * upkeep / (tick * ticks), first_s, states, kernels)


def largest_batch(
    config: ModelConfig, recipe: Recipe, parameter_bytes: int, context: int, tp: int = 1
) -> int:
    """Rows of ``context`` tokens that fit each of ``tp`` devices beside so many bytes of weights,
    a multiple of eight where there are as many."""
    planned = plan(
        config,
        recipe,
        batch_size=1,
        prompt_tokens=PROMPT,
        max_new_tokens=context - PROMPT,
        dtype=jnp.bfloat16,
        parameter_bytes=parameter_bytes,
        memory_bytes=int(_ROOM * device_memory()),
        tp=tp,
    )
    return _in_eights(planned.largest_batch())


def _in_eights(rows: int) -> int:
    return rows // 8 * 8 or rows


def measure(
    config: ModelConfig,
    model: Decoder,
    name: str,
    budget: int,
    rows: int,
    context: int,
    repeats: int,
    bandwidth: float,
    kernel: Implementation | None = None,
    profile: bool = False,
    tick: int | None = None,
) -> dict:
    """Raw milliseconds a step for each of ``repeats`` periods, and the roofline beside them.

    Weights take the time to read them or to multiply all rows by them, whichever is longer.
    """
    embedding = config.vocab_size * config.hidden_size * 2  # one row of it is read, not all
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    largest = rows == LARGEST
    if name == GATHERED:
        slots = budget + EVERY
        # Bytes of a channel's key and value in all heads, and as many of a position.
        each = 4 * config.num_layers * config.num_kv_heads
        own = each * (config.head_dim + 1)
        if largest:
            rows = _in_eights(int((_ROOM * device_memory() - parameters) // (own * slots)))
        found, held = timed_gathered(config, model, budget, rows, context, repeats)
        # The cache grows from the budget to all of its slots.
        read = rows * each * config.head_dim * (budget + EVERY / 2)
    else:
        recipe = method_of(name, budget)
        if tick is not None:
            recipe = dataclasses.replace(recipe, tick=tick)
        budget = recipe.budget
        if largest:
            rows = largest_batch(config, recipe, parameters, context)
        how = {"kernel": kernel, "profile": profile}
        found = timed(config, [(None, model)], recipe, rows, context, repeats, **how)
        [state] = found.states
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache))
        read = _bytes_read(state.cache)
    weights = parameters - embedding
    bytes_a_step = weights + read
    # Two operations for each weight, of two bytes, and row.
    floor_ms = 1000 * (max(weights / bandwidth, weights * rows / PRODUCTS) + read / bandwidth)
    step_ms = statistics.median(found.raw_ms)
    return {
        "method": name,
        "kernel": kernel,
        "tick": None if name == GATHERED else recipe.tick,
        "budget": budget,
        "batch": rows,
        "largest": largest,
        "context": context,
        "step_ms": step_ms,
        "upkeep_ms": found.upkeep_ms,
        "tokens_per_s": 1000 * rows / step_ms,
        "bytes_a_step": round(bytes_a_step),
        "cache_bytes": held,
        "peak_bytes": memory_in_use()["peak_bytes"],
        "floor_ms": floor_ms,
        "fraction_of_roofline": floor_ms / step_ms,
        "first_period_s": found.first_s,
        "raw_ms": found.raw_ms,
        "kernels": found.kernels[:MOST_KERNELS],
    }


def timed_gathered(
    config: ModelConfig,
    model: Decoder,
    budget: int,
    rows: int,
    context: int,
    repeats: int,
    warm: int = 3,
) -> tuple[Timed, int]:
    """Time R-KV with gathered survivors as ``timed`` does, and say what its cache takes."""
    selector, raw = recipes.rkv().selector, []
    state = gathered.empty(config, rows, budget + EVERY, selector, jnp.bfloat16)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state.layers))
    filled = functools.partial(jnp.full_like, state.held)
    state = state._replace(held=filled(budget), length=filled(context))
    cut = functools.partial(gathered.cut, scale=config.scale, selector=selector, budget=budget)
    start = time.perf_counter()
    for i in range(repeats + warm):
        if i == warm - 1:  # by itself, to see how long it takes
            state, _ = jax.block_until_ready(gathered.decode(model, state, steps=EVERY))
            began = time.perf_counter()
            state = jax.block_until_ready(cut(state))
            upkeep_ms = 1000 * (time.perf_counter() - began) / EVERY
            continue

        def period():
            nonlocal state
            state, tokens = gathered.decode(model, state, steps=EVERY)
            state = cut(state)
            return state.held, tokens

        seconds = _seconds(period)
        if i == 0:
            first_s = time.perf_counter() - start
        if i >= warm:
            raw.append(1000 * seconds / EVERY)
    return Timed(raw, upkeep_ms, first_s, []), held


def _period(recipe: Recipe) -> int:
    """Steps after which the maintenance of a recipe is where it was."""
    if recipe.retention is not None:
        return recipe.segmenter.every
    return recipe.every if recipe.selector is not None else recipe.tick


def _bytes_read(cache: KVCache) -> float:
    """What one step reads: the live slots' keys, values, scales and biases."""
    slots, _ = held(cache)
    total = 0.0
    for index, layer in enumerate(cache.layers):
        for c, pool in enumerate(layer.pools):
            parts = (pool.k, pool.v, pool.bias, pool.k_scale, pool.v_scale)
            each = sum(part.nbytes for part in parts if part is not None)
            each /= pool.bias.size
            total += each * float(slots[:, index, c].sum())
    return total


def _seconds(call) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    batches = f"{LARGEST}: the largest that fits"
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128], help=batches)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["full"])
    parser.add_argument("--budget", type=int, default=1024, help="of what evicts")
    parser.add_argument("--tick", type=int, help="steps between two upkeeps, instead of 16")
    parser.add_argument("--kernel", choices=get_args(Implementation), help="of attention")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="also say which kernels take long")
    parser.add_argument("--layers", type=int, default=LLAMA_8B["num_hidden_layers"])
    parser.add_argument("--commit", help="of the code, where this runs outside a checkout")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the raw figures")
    args = parser.parse_args()
    if args.tick is not None and {"full", GATHERED} & set(args.methods):
        parser.error(f"--tick: full and {GATHERED} have no upkeep every so many steps")
    config = ModelConfig.from_hf({**LLAMA_8B, "num_hidden_layers": args.layers})
    model = random_model(config)
    bandwidth = read_bandwidth()
    record = {
        "run": run_record(args.commit),
        "shape": {**LLAMA_8B, "num_hidden_layers": args.layers},
        "read_bandwidth_bytes_per_s": bandwidth,
        "results": [],
    }
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s")
    print("method       batch  ms/step  upkeep  tokens/s  floor ms", end="  ")
    print("of roofline  cache GiB  first period s")
    size = {"context": args.context, "repeats": args.repeats, "bandwidth": bandwidth}
    size |= {"kernel": args.kernel, "profile": args.profile, "tick": args.tick}
    for name in args.methods:
        fits = True  # where one batch does not, a larger one does not either
        for rows in args.batch:
            if not fits and rows != LARGEST:
                continue
            try:
                result = measure(config, model, name, args.budget, rows, **size)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                print(f"{name:12} {rows:5d} does not fit", flush=True)
                fits = False
                continue
            record["results"].append(result)
            print(
                f"{name:12} {result['batch']:5d} {result['step_ms']:8.3f} "
                f"{result['upkeep_ms']:7.3f} "
                f"{result['tokens_per_s']:9.0f} "
                f"{result['floor_ms']:9.3f} {result['fraction_of_roofline']:12.2f} "
                f"{result['cache_bytes'] / 2**30:10.2f} {result['first_period_s']:15.1f}",
                flush=True,
            )
            for kernel in result["kernels"][:12]:
                print(f"    {kernel['ms']:9.2f} ms {kernel['count']:7d} x {kernel['name']}")
            if args.out:
                write_json(args.out, record)


if __name__ == "__main__":
    main()
