"""Milliseconds a decode step takes at a model's shape, with random weights and a filled cache.

    python -m kvjax.eval.bench_decode --batch 1 8 32 128 --out eval/results/decode_h200.json

Times ``decode_chunk``, the program that decoding calls, over a chunk of steps inside one jit, and
sets it against the memory roofline: the bytes that a step must read over the bandwidth that the
same run measured.
"""

import argparse
import dataclasses
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.cache import init_cache, plan, reserve
from kvjax.decoding.chunk import DecodeState, decode_chunk
from kvjax.eval.record import run_record, write_json
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.recipes import full

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


def filled(config: ModelConfig, rows: int, context: int, steps: int) -> DecodeState:
    """Every row at ``context`` tokens with random keys and values."""
    planned = plan(
        config,
        full(),
        batch_size=rows,
        prompt_tokens=context,
        max_new_tokens=steps,
        dtype=jnp.bfloat16,
        parameter_bytes=0,
    )
    length = jnp.full(rows, context, jnp.int32)
    cache = jax.jit(reserve)(init_cache(planned.geometry), length)

    @jax.jit
    def fill(layer, key):
        (pool,), (table,) = layer.pools, layer.tables
        k, v = (
            jax.random.normal(part, shape, pool.k.dtype)
            for part, shape in zip(jax.random.split(key), (pool.k.shape, pool.v.shape), strict=True)
        )
        slots = jnp.arange(table.shape[2] * pool.page_size, dtype=jnp.int32)
        pos = slots.reshape(1, 1, table.shape[2], pool.page_size)
        kept = (pos < context) & (table > 0)[..., None]
        bias = pool.bias.at[table].set(jnp.where(kept, 0.0, -jnp.inf))
        pos = pool.pos.at[table].set(jnp.where(kept, pos, -1))
        return dataclasses.replace(
            layer, pools=(dataclasses.replace(pool, k=k, v=v, bias=bias, pos=pos),)
        )

    keys = jax.random.split(jax.random.key(1), config.num_layers)
    layers = tuple(fill(layer, key) for layer, key in zip(cache.layers, keys, strict=True))
    return DecodeState(
        dataclasses.replace(cache, layers=layers, length=length),
        jnp.zeros(rows, jnp.int32),
        jnp.full(rows, 2 * steps, jnp.int32),
        jnp.ones(rows, bool),
    )


def measure(
    config: ModelConfig, model: Decoder, rows: int, context: int, repeats: int, bandwidth: float
) -> dict:
    """Raw milliseconds a step for each of ``repeats`` chunks, and the roofline beside them."""
    steps, warm = 16, 3  # a command buffer is recorded in its second run
    state = filled(config, rows, context, steps * (repeats + warm))
    halt = np.zeros(rows, bool)
    raw = []
    start = time.perf_counter()
    for i in range(repeats + warm):

        def chunk():
            nonlocal state
            state, output = decode_chunk(model, state, None, halt, steps=steps, stop_ids=())
            return output

        seconds = _seconds(chunk)
        if i == 0:
            first_s = time.perf_counter() - start
        if i >= warm:
            raw.append(1000 * seconds / steps)
    tokens = context + steps * (warm + repeats / 2)
    embedding = config.vocab_size * config.hidden_size * 2  # one row of it is read, not all
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model)) - embedding
    cached = rows * tokens * config.num_layers * config.num_kv_heads * config.head_dim * 4
    floor_ms = 1000 * (weights + cached) / bandwidth
    step_ms = statistics.median(raw)
    return {
        "batch": rows,
        "context": context,
        "step_ms": step_ms,
        "tokens_per_s": 1000 * rows / step_ms,
        "bytes_a_step": round(weights + cached),
        "floor_ms": floor_ms,
        "fraction_of_roofline": floor_ms / step_ms,
        "first_chunk_s": first_s,
        "raw_ms": raw,
    }


def _seconds(call) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--layers", type=int, default=LLAMA_8B["num_hidden_layers"])
    parser.add_argument("--commit", help="of the code, where this runs outside a checkout")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the raw figures")
    args = parser.parse_args()
    config = ModelConfig.from_hf({**LLAMA_8B, "num_hidden_layers": args.layers})
    init = jax.jit(lambda key: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(params=key)))
    model = jax.block_until_ready(init(jax.random.key(0)))
    bandwidth = read_bandwidth()
    record = {
        "run": run_record(args.commit),
        "shape": {**LLAMA_8B, "num_hidden_layers": args.layers},
        "read_bandwidth_bytes_per_s": bandwidth,
        "results": [],
    }
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s")
    print("batch  ms/step  tokens/s  floor ms  of roofline  first chunk s")
    for rows in args.batch:
        result = measure(config, model, rows, args.context, args.repeats, bandwidth)
        record["results"].append(result)
        print(
            f"{rows:5d} {result['step_ms']:8.3f} {result['tokens_per_s']:9.0f} "
            f"{result['floor_ms']:9.3f} {result['fraction_of_roofline']:12.2f} "
            f"{result['first_chunk_s']:14.1f}",
            flush=True,
        )
        if args.out:
            write_json(args.out, record)


if __name__ == "__main__":
    main()
