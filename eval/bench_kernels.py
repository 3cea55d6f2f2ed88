"""Milliseconds of one call of ``paged_attention``, for every format of the cache.

    python -m kvjax.eval.bench_kernels --out eval/results/kernels_h200.json

A call takes one query for each row of a batch to a pool of codes (with scales, biases and free
slots, pages in random order) and to the few recent tokens' pool, as a step of decoding does. Calls
are chained inside one jit. They are set against the memory roofline, and against attention that
other libraries compute over the same number of bfloat16 tokens.
"""

import argparse
import functools
import importlib
import pathlib
import statistics
import time
import warnings

import jax
import jax.numpy as jnp

from kvjax.eval.record import run_record, write_json
from pallas_kernels import KVPages, paged_attention
from pallas_kernels.formats import PER_BYTE

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
CALLS = 40


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


def chained(attend):
    """``CALLS`` calls in one program, each of which needs the result of the last."""

    @jax.jit
    def calls(q, *arguments):
        def call(_, q):
            return q + (attend(q, *arguments) * 1e-3).astype(q.dtype)

        return jax.lax.fori_loop(0, CALLS, call, q)

    return calls


def measure(attend, repeats: int, *arguments) -> dict:
    """Milliseconds a call, of every repeat, and whether a kernel of ours was in it."""
    calls = chained(attend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        lowered = calls.lower(*arguments)
    text = lowered.as_text()
    compiled = lowered.compile()
    raw = []
    for _ in range(repeats + 2):  # a command buffer is recorded in its second run
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        raw.append(1000 * (time.perf_counter() - start) / CALLS)
    backend = "triton" if "xla.gpu.triton" in text else "cudnn" if "cudnn" in text else "xla"
    return {"backend": backend, "ms": statistics.median(raw[2:]), "raw_ms": raw[2:]}


def ours(name: str, rows: int, tokens: int, page: int, repeats: int, implementation) -> dict:
    """The public op over a pool of the format and the recent tokens."""
    keys = jax.random.split(jax.random.key(0), 3)
    main = random_pool(keys[0], FORMATS[name], rows, page, tokens // page)
    recent = random_pool(keys[1], ("float", "float"), rows, RECENT_PAGE, RECENT_PAGES)
    pools, tables = zip(main, recent, strict=True)
    leaves, kind = jax.tree.flatten(pools)
    q = jax.random.normal(keys[2], (rows, KV_HEADS * GROUP, DIM), jnp.bfloat16)

    def attend(q, tables, *leaves):
        # Leaf by leaf: lowering rebuilds its arguments out of descriptions of arrays.
        pools = jax.tree.unflatten(kind, leaves)
        options = {"scale": DIM**-0.5, "implementation": implementation}
        return paged_attention(q, pools, tables, **options)[0]

    found = measure(attend, repeats, q, tables, *leaves)
    moved = read_bytes(list(pools))
    rate = 1000 * moved / found["ms"]
    return {"format": name, "page": page, "bytes": moved, "bytes_per_s": rate,
            "of_roofline": rate / BANDWIDTH, **found}  # fmt: skip


def contiguous(implementation: str, rows: int, tokens: int, repeats: int) -> dict:
    """``jax.nn.dot_product_attention`` over keys and values that lie in order."""
    keys = jax.random.split(jax.random.key(0), 3)
    shape = rows, tokens, KV_HEADS, DIM
    k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:2])
    q = jax.random.normal(keys[2], (rows, 1, KV_HEADS * GROUP, DIM), jnp.bfloat16)
    attend = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
    return measure(attend, repeats, q, k, v)


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
    return measure(attend, repeats, q, k, v, table, jnp.full(rows, tokens, jnp.int32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--implementation", choices=["triton", "xla"], help="of paged_attention")
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--shapes", nargs="+", type=int, default=[0, 1], help="which of SHAPES")
    parser.add_argument("--no-others", action="store_true", help="only paged_attention")
    parser.add_argument("--commit", help="of the code, where this runs outside a checkout")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the raw figures")
    args = parser.parse_args()
    record = {
        "run": run_record(args.commit),
        "shape": {"kv_heads": KV_HEADS, "query_heads": KV_HEADS * GROUP, "head_dim": DIM},
        "results": [],
    }
    print("rows tokens  what                 backend      ms   TB/s  of roofline")

    def note(what: str, rows: int, tokens: int, run) -> None:
        result = {"what": what, "rows": rows, "tokens": tokens}
        try:
            result |= run()
        except Exception as error:  # another library's, or more than this device has
            result["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        # The others read keys and values in bfloat16, and nothing else.
        moved = result.get("bytes", rows * tokens * KV_HEADS * DIM * 4)
        line = f"{rows:4d} {tokens:6d}  {what:20s} "
        if "ms" in result:
            rate = 1000 * moved / result["ms"]
            line += f"{result['backend']:7s} {result['ms']:8.4f} {rate / 1e12:6.2f}"
            line += f" {rate / BANDWIDTH:8.2f}"
        print(line + result.get("error", ""), flush=True)
        record["results"].append(result)
        if args.out:
            write_json(args.out, record)

    for rows, tokens in (SHAPES[i] for i in args.shapes):
        for name in args.formats:
            fixed = name, rows, tokens, args.page, args.repeats, args.implementation
            note(f"paged_attention {name}", rows, tokens, functools.partial(ours, *fixed))
        if not args.no_others:
            rest = rows, tokens, args.repeats
            for backend in ("cudnn", "xla"):
                note(f"contiguous {backend}", rows, tokens,
                     functools.partial(contiguous, backend, *rest))  # fmt: skip
            note("jax paged_attention", rows, tokens,
                 functools.partial(jax_paged, rows, tokens, 16, args.repeats))  # fmt: skip


if __name__ == "__main__":
    main()
