"""Milliseconds of one call of ``paged_attention`` and of ``write_slots``, for formats of the cache,
and of the K-means of a segment.

    python -m kvjax.eval.bench_kernels --out eval/results/kernels_h200.json

A call of attention takes one query for each row of a batch to a pool of codes (with scales, biases
and free slots, pages in random order) and to the few recent tokens' pool, as a step of decoding
does. Calls are chained inside one jit. They are set against the memory roofline, against XLA's
gather, and against attention that other libraries compute over as many bfloat16 tokens, PyTorch
among them where the plain ``python3`` has it.

A call of ``write_slots`` takes the tokens that leave the recent window of every row at a time: in
one launch, into neighbouring slots or any, and in XLA's way.

K-means is ``cluster_centers`` for every demotion of a segment of 128 tokens, in both ways.
"""

import argparse
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import statistics
import subprocess
import time
import warnings
from typing import get_args

import jax
import jax.numpy as jnp

from kvjax.eval.record import run_record, write_json
from kvjax.thoughts.retention import Retention, evenly
from pallas_kernels import SCRATCH_PAGE, KVPages, cluster_centers, paged_attention, write_slots
from pallas_kernels.formats import PER_BYTE
from pallas_kernels.paged_attention.api import Implementation
from pallas_kernels.write_slots.triton import write_slots_triton

KV_HEADS, GROUP, DIM = 8, 4, 128
SHAPES = ((32, 8192), (256, 1024))
FORMATS = {
    "bf16": ("float", "float"),
    "fp8": ("fp8", "fp8"),
    "int8": ("int8", "int8"),
    "int4": ("int4", "int4"),
    "k4v2": ("int4", "int2"),
    "int2": ("int2", "int2"),
}
RECENT_PAGE, RECENT_PAGES = 16, 3
FREE = 0.05  # of the slots of owned pages
BANDWIDTH = 4.8e12  # bytes a second, by the H200's datasheet
CALLS, STORES = 40, 400


@dataclasses.dataclass(frozen=True)
class StoreShape:
    """Tokens of every row and KV head to store.

    Attributes:
        pages: that a KV head owns.
        scattered: into any of their slots, as after many evictions, instead of neighbours.
    """

    rows: int = 64
    tokens: int = 16
    page: int = 64
    pages: int = 4
    scattered: bool = False


def random_pool(key, formats: tuple[str, str], rows: int, page: int, pages: int):
    """Pages of random codes, and a table that names them in random order."""
    keys = iter(list(jax.random.split(key, 6)))
    total = 1 + rows * KV_HEADS * pages

    def side(fmt):
        shape = total, page, DIM // PER_BYTE.get(fmt, 1)
        if fmt == "float":
            return jax.random.normal(next(keys), shape, jnp.bfloat16), None
        codes = jax.random.bits(next(keys), shape, jnp.uint8)
        scale = jax.random.uniform(next(keys), shape[:2], minval=0.005, maxval=0.01)
        # With one exponent bit clear, no code of fp8 is NaN.
        return codes & (0xBF if fmt == "fp8" else 0xFF), scale.astype(jnp.float16)

    (k, k_scale), (v, v_scale) = (side(fmt) for fmt in formats)
    free = jax.random.uniform(next(keys), (total, page)) < FREE
    bias = jnp.where(free, -jnp.inf, 0.0).at[0].set(-jnp.inf)
    table = 1 + jax.random.permutation(next(keys), total - 1).astype(jnp.int32)
    pool = KVPages(
        k,
        v.reshape(total, -1, page),
        bias,
        jnp.zeros((total, page), jnp.int32),
        k_scale=None if k_scale is None else k_scale[:, :, None],
        v_scale=None if v_scale is None else v_scale[:, None],
        k_format=formats[0],
        v_format=formats[1],
        rotated="float" not in formats,
    )
    return pool, table.reshape(rows, KV_HEADS, pages)


def read_bytes(pools: list[KVPages]) -> int:
    """What one call has to read: codes, scales and biases."""
    names = ("k", "v", "bias", "k_scale", "v_scale")
    arrays = (getattr(pool, name) for pool in pools for name in names)
    return sum(array.nbytes for array in arrays if array is not None)


def store_arguments(name: str, shape: StoreShape) -> tuple[KVPages, jax.Array, dict]:
    """A pool of a format, its table, and the arguments of ``write_slots`` beside it."""
    keys = jax.random.split(jax.random.key(0), 4)
    pool, table = random_pool(keys[0], FORMATS[name], shape.rows, shape.page, shape.pages)
    size = shape.rows, KV_HEADS, shape.tokens
    place = jnp.broadcast_to(jnp.arange(shape.tokens, dtype=jnp.int32), size)
    if shape.scattered:
        every = jnp.arange(shape.page * shape.pages, dtype=jnp.int32)
        every = jnp.broadcast_to(every, (*size[:2], every.size))
        place = jax.random.permutation(keys[1], every, 2, independent=True)[..., : shape.tokens]
    k, v = (jax.random.normal(key, (*size, DIM), jnp.bfloat16) for key in keys[2:])
    return pool, table, {
        "pages": jnp.take_along_axis(table, place // shape.page, 2),
        "slots": place % shape.page,
        "k": k,
        "v": v,
        "pos": jnp.zeros((shape.rows, shape.tokens), jnp.int32),
    }  # fmt: skip


def attention(attend):
    """A step of ``measure`` that needs the output of the last one as its query."""

    def step(_, q, *arguments):
        return q + (attend(q, *arguments) * 1e-3).astype(q.dtype)

    return step


def measure(step, repeats: int, state, *arguments, calls: int = CALLS) -> dict:
    """Milliseconds a call, of every repeat, and whether a kernel of ours was in it.

    Args:
        step: what makes the next state of the number of a call, the state and the arguments.
    """

    @jax.jit
    def run(state, *arguments):
        return jax.lax.fori_loop(0, calls, lambda i, state: step(i, state, *arguments), state)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        lowered = run.lower(state, *arguments)
    text = lowered.as_text()
    compiled = lowered.compile()
    raw = []
    for _ in range(repeats + 2):  # a command buffer is recorded in its second run
        start = time.perf_counter()
        jax.block_until_ready(compiled(state, *arguments))
        raw.append(1000 * (time.perf_counter() - start) / calls)
    names = {"mosaic_gpu": "mosaic", "xla.gpu.triton": "triton", "cudnn": "cudnn"}
    backend = next((name for mark, name in names.items() if mark in text), "xla")
    return {"backend": backend, "ms": statistics.median(raw[2:]), "raw_ms": raw[2:]}


def ours(name: str, rows: int, tokens: int, page: int, repeats: int, op) -> dict:
    """``op``, the public one, over a pool of the format and the recent tokens."""
    keys = jax.random.split(jax.random.key(0), 3)
    main = random_pool(keys[0], FORMATS[name], rows, page, tokens // page)
    recent = random_pool(keys[1], ("float", "float"), rows, RECENT_PAGE, RECENT_PAGES)
    pools, tables = zip(main, recent, strict=True)
    leaves, kind = jax.tree.flatten(pools)
    q = jax.random.normal(keys[2], (rows, KV_HEADS * GROUP, DIM), jnp.bfloat16)

    def attend(q, tables, *leaves):
        # Leaf by leaf: lowering rebuilds its arguments out of descriptions of arrays.
        pools = jax.tree.unflatten(kind, leaves)
        out, _, *mass = op(q, pools, tables, scale=DIM**-0.5)
        return out + sum(part.sum() for part in mass[0]) * 1e-9 if mass else out

    found = measure(attention(attend), repeats, q, tables, *leaves)
    moved = read_bytes(list(pools))
    rate = 1000 * moved / found["ms"]
    return {"format": name, "page": page, "bytes": moved, "bytes_per_s": rate,
            "of_roofline": rate / BANDWIDTH, **found}  # fmt: skip


def storing(name: str, shape: StoreShape, repeats: int, store) -> dict:
    """Coding and storing tokens, from the model's numbers on."""
    pool, _, arguments = store_arguments(name, shape)
    state, kind = jax.tree.flatten(pool)

    def step(i, leaves, pages, slots, k, v, pos):
        # Nothing of a call may be found to be the same in all of them.
        pages = jnp.where(i < 0, SCRATCH_PAGE, pages)
        pool = jax.tree.unflatten(kind, leaves)
        return jax.tree.leaves(store(pool, pages, slots, k, v, pos))

    found = measure(step, repeats, state, *arguments.values(), calls=STORES)
    slot = read_bytes([pool]) // pool.bias.size + 4  # and its position
    numbers = arguments["k"]
    moved = 2 * numbers.nbytes + slot * (numbers.size // DIM)
    return {
        "format": name,
        "page": shape.page,
        "scattered": shape.scattered,
        "bytes": moved,
        **found,
    }


def clustering(rows: int, tokens: int, repeats: int, implementation: str) -> dict:
    """The tokens that stay of a segment at each demotion; here each has keys of its own."""
    how = Retention()
    sizes = how.sizes(tokens)
    levels = [
        jax.random.normal(jax.random.key(before), (rows, KV_HEADS, before, DIM))
        for before in sizes[:-1]
    ]

    def step(_, zero, *levels):
        for keys, count in zip(levels, sizes[1:], strict=True):
            # Nothing of a call may be found to be the same in all of them.
            start = zero + evenly(keys.shape[2], count)
            near, apart = cluster_centers(
                keys, start, how.iterations, implementation=implementation
            )
            zero = (jnp.where(near, apart, 0).sum() < 0).astype(jnp.int32)
        return zero

    found = measure(step, repeats, jnp.int32(0), *levels)
    return {"bytes": sum(keys.nbytes for keys in levels), **found}


def contiguous(implementation: str, rows: int, tokens: int, repeats: int) -> dict:
    """``jax.nn.dot_product_attention`` over keys and values that lie in order."""
    keys = jax.random.split(jax.random.key(0), 3)
    shape = rows, tokens, KV_HEADS, DIM
    k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:2])
    q = jax.random.normal(keys[2], (rows, 1, KV_HEADS * GROUP, DIM), jnp.bfloat16)
    attend = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
    return measure(attention(attend), repeats, q, k, v)


def torch_contiguous(rows: int, tokens: int, repeats: int) -> dict:
    """PyTorch's, likewise, where there is a ``python3`` that has it: the faster of two ways.

    Raises:
        FileNotFoundError: there is no ``python3``.
        RuntimeError: it has no PyTorch, or that sees no GPU.
    """
    peer = pathlib.Path(__file__).with_name("peer_attention.py")
    numbers = rows, tokens, KV_HEADS, GROUP, DIM, CALLS, repeats
    done = subprocess.run(
        ["python3", str(peer), *map(str, numbers)],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    told = json.loads(done.stdout)
    way, raw = min(told["ms"].items(), key=lambda pair: statistics.median(pair[1]))
    backend = f"torch {told['version']}, {way}"
    return {"backend": backend, "ms": statistics.median(raw), "raw_ms": raw}


def jax_paged(rows: int, tokens: int, page: int, repeats: int) -> dict:
    """JAX's own paged attention for GPUs, over bfloat16 pages that all KV heads share."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")
    keys = jax.random.split(jax.random.key(0), 4)
    pages = rows * tokens // page
    shape = KV_HEADS, pages, page, DIM
    k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:2])
    table = jax.random.permutation(keys[2], pages).astype(jnp.int32).reshape(rows, -1)
    q = jax.random.normal(keys[3], (rows, KV_HEADS * GROUP, DIM), jnp.bfloat16)
    attend = functools.partial(module.paged_attention, k_splits=8)
    lengths = jnp.full(rows, tokens, jnp.int32)
    return measure(attention(attend), repeats, q, k, v, table, lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--implementation", choices=get_args(Implementation))
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--warps", nargs="*", type=int, default=[], help="of write_slots, to try")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--shapes", nargs="+", type=int, default=[0, 1], help="which of SHAPES")
    parser.add_argument("--no-others", action="store_true", help="only our own kernels")
    parser.add_argument("--commit", help="of the code, where this runs outside a checkout")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the raw figures")
    args = parser.parse_args()
    record = {
        "run": run_record(args.commit),
        "shape": {"kv_heads": KV_HEADS, "query_heads": KV_HEADS * GROUP, "head_dim": DIM},
        "results": [],
    }
    print("rows tokens  what                           backend      ms   TB/s  of roofline")

    def note(what: str, rows: int, tokens: int, run) -> None:
        result = {"what": what, "rows": rows, "tokens": tokens}
        try:
            result |= run()
        except Exception as error:  # another library's, or more than this device has
            result["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        # The others read keys and values in bfloat16, and nothing else.
        moved = result.get("bytes", rows * tokens * KV_HEADS * DIM * 4)
        line = f"{rows:4d} {tokens:6d}  {what:30s} "
        if "ms" in result:
            rate = 1000 * moved / result["ms"]
            line += (
                f"{result['backend'].partition(' ')[0]:7s} {result['ms']:8.4f} {rate / 1e12:6.2f}"
            )
            line += f" {rate / BANDWIDTH:8.2f}"
        print(line + result.get("error", ""), flush=True)
        record["results"].append(result)
        if args.out:
            write_json(args.out, record)

    by, gather = {"implementation": args.implementation}, {"implementation": "xla"}
    op = functools.partial(paged_attention, **by)
    for rows, tokens in (SHAPES[i] for i in args.shapes):

        def call(name, op, rows=rows, tokens=tokens):
            return ours(name, rows, tokens, args.page, args.repeats, op)

        for name in args.formats:
            note(f"paged_attention {name}", rows, tokens, functools.partial(call, name, op))
        for name in [name for name in ("bf16", "int4") if name in args.formats]:
            for what, way in (("mass", {**by, "with_mass": True}), ("gather", gather)):
                run = functools.partial(call, name, functools.partial(paged_attention, **way))
                note(f"paged_attention {name}, {what}", rows, tokens, run)
        if not args.no_others:
            rest = rows, tokens, args.repeats
            for backend in ("cudnn", "xla"):
                note(f"contiguous {backend}", rows, tokens,
                     functools.partial(contiguous, backend, *rest))  # fmt: skip
            note("contiguous torch", rows, tokens, functools.partial(torch_contiguous, *rest))
            note("jax paged_attention", rows, tokens,
                 functools.partial(jax_paged, rows, tokens, 16, args.repeats))  # fmt: skip

    for name in [name for name in ("bf16", "int4", "int2") if name in args.formats]:
        own, xla = (functools.partial(write_slots, implementation=by) for by in ("triton", "xla"))
        ways = [("triton", own, False), ("scattered", own, True), ("xla", xla, False)]
        for warps in args.warps:
            kernel = functools.partial(write_slots_triton, num_warps=warps)
            ways.append((f"{warps} warps", kernel, False))
        for what, store, scattered in ways:
            shape = StoreShape(scattered=scattered)
            run = functools.partial(storing, name, shape, args.repeats, store)
            note(f"write_slots {name}, {what}", shape.rows, shape.tokens, run)

    for by in ("triton", "xla"):
        segment = SHAPES[1][0], 128
        run = functools.partial(clustering, *segment, args.repeats, by)
        note(f"cluster_centers {by}", *segment, run)


if __name__ == "__main__":
    main()
