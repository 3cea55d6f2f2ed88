"""The ops as a GPU runs them. `make venv`, `.venv/bin/pip install -e .[cuda]`, then
`.venv/bin/python -m pytest -m gpu tests/gpu`. docs/kernels.md says how to run it under
compute-sanitizer, and ``trial`` how to see first that no case hangs."""

import dataclasses
import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.eval.bench_kernels import FORMATS, SHAPES, StoreShape, random_pool, store_arguments
from pallas_kernels import SCRATCH_PAGE, KVPages, cluster_centers, paged_attention, write_slots
from pallas_kernels.formats import PER_BYTE, middle
from pallas_kernels.paged_attention.api import Implementation
from pallas_kernels.paged_attention.hopper.plan import unsupported
from pallas_kernels.paged_attention.mosaic import other_device
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.rotation import rotate, rotation, unrotate
from tests.kernels import cases, coded
from tests.kernels.cases import Case
from tests.kernels.segments import compare, keys_of, start_of
from tests.kernels.stores import SHAPES as STORES
from tests.kernels.stores import bits, oracle, pointers, problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason=f"no NVIDIA GPU. {__doc__}"),
]
WIDE = Case(head_dim=128, group=4, page=64, dtype="bfloat16", lengths="empty between full")
COVERING = cases.covering(head_dim=(64, 96, 128, 256), page=(16, 32, 64, 128))
CODED = [("int8", 64, 17), ("int4", 128, 16), ("int2", 256, 15), ("fp8", 128, 1),
         ("k4v2", 128, 33), ("k16v4", 64, 16), ("bf16", 96, 5)]  # fmt: skip
BENCHMARK = [*((name, SHAPES[0]) for name in FORMATS), ("int4", SHAPES[1])]
SEGMENTS = [(128, 128), (64, 64)]
"""Tokens and channels."""
RUNS = 10


def attend(problem: cases.Problem, implementation):
    fixed = {name: getattr(problem, name) for name in ("scale", "window", "soft_cap")}
    fixed["with_mass"] = implementation != "mosaic"
    fn = functools.partial(paged_attention, implementation=implementation, **fixed)
    arrays = {"q_pos": problem.q_pos, "sinks": problem.sinks}
    return jax.jit(lambda q, pools, tables, arrays: fn(q, pools, tables, **arrays))(
        problem.q, problem.pools, problem.tables, arrays
    )


def skip_others_of_mosaic(implementation, q, pools, tables):
    if implementation == "mosaic":
        reason = other_device() or unsupported((q,) * len(pools), pools, tables)
        if reason:
            pytest.skip(reason)


def test_at_most_60_configurations():
    assert len(COVERING) + len(BENCHMARK) + len(STORES) + len(CODED) + len(SEGMENTS) <= 60


@pytest.mark.parametrize("implementation", get_args(Implementation))
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_paged_attention(case, implementation):
    problem = cases.build(case)
    skip_others_of_mosaic(implementation, problem.q, problem.pools, problem.tables)
    problem = cases.finite(problem) if implementation == "xla" else problem
    cases.check(attend(problem, implementation), problem)


def test_the_kernel_is_what_runs():
    problem = cases.build(WIDE)

    def text(implementation):
        # Pages leaf by leaf: lowering rebuilds its arguments out of descriptions of arrays, which
        # are no pages.
        def attend(q, tables, *leaves):
            pools = [KVPages(*leaves)]
            return paged_attention(q, pools, tables, implementation=implementation, scale=0.1)

        leaves = jax.tree.leaves(problem.pools)
        return jax.jit(attend).lower(problem.q, problem.tables, *leaves).compile().as_text()

    assert "gpu$xla.gpu.triton" in text(None) and "gpu$xla.gpu.triton" not in text("xla")


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize(("name", "shape"), BENCHMARK, ids=str)
def test_paged_attention_of_the_benchmark(name, shape, implementation):
    """Long rows with recent tokens beside them, against the reference; ten times the same."""
    rows, tokens = shape
    keys = jax.random.split(jax.random.key(0), 3)
    main = random_pool(keys[0], FORMATS[name], rows, 64, tokens // 64)
    recent = random_pool(keys[1], ("float", "float"), rows, 16, 3)
    pools, tables = zip(main, recent, strict=True)
    q = jax.random.normal(keys[2], (rows, 32, 128), jnp.bfloat16)
    skip_others_of_mosaic(implementation, q, pools, tables)
    fn = functools.partial(paged_attention, scale=128**-0.5, implementation=implementation)
    attend = jax.jit(lambda q, pools, tables: fn(q, pools, tables))
    runs = [jax.device_get(attend(q, pools, tables)) for _ in range(RUNS)]
    assert len({(out.tobytes(), lse.tobytes()) for out, lse in runs}) == 1
    out, lse = runs[0]
    for row in range(0, rows, max(1, rows // 4)):  # the reference is dense, in float32
        one = slice(row, row + 1)
        part = (q[one],) * 2, pools, tuple(table[one] for table in tables)
        expected, expected_lse, _ = paged_attention_reference(*part, scale=128**-0.5)
        largest = float(jnp.abs(expected).max())
        np.testing.assert_allclose(out[one], expected, rtol=0, atol=0.02 * largest)
        np.testing.assert_allclose(lse[one], expected_lse, rtol=0, atol=0.02)


@pytest.mark.parametrize("fmt", ["float", "int8", "int4", "int2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", get_args(Implementation))
def test_long_rows_against_the_reference(implementation, dtype, fmt):
    """Thousands of slots a row, so that every share takes several pages."""
    rng = np.random.default_rng(0)
    rows, heads, width, page, dim = 16, 8, 24, 64, 64
    total = 1 + rows * heads * width

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.dtype(dtype))

    def draw_codes(*shape):
        return jnp.asarray(rng.integers(0, 256, shape), jnp.uint8)

    codes, scales = {}, {}
    if fmt != "float":
        stored = dim // PER_BYTE[fmt]
        codes = {"k": draw_codes(total, page, stored), "v": draw_codes(total, stored, page)}
        scale = rng.uniform(0.5, 2, (2, total, page)) / middle(fmt)
        k_scale, v_scale = jnp.asarray(scale, jnp.float16)
        scales = {"k_scale": k_scale[:, :, None], "v_scale": v_scale[:, None]}
    bias = rng.choice([0, 1.0, -np.inf], (total, page)).astype(np.float32)
    bias[0] = -np.inf
    numbers = codes or {"k": draw(total, page, dim), "v": draw(total, dim, page)}
    pages = KVPages(
        bias=jnp.asarray(bias),
        pos=jnp.asarray(rng.integers(0, 4000, (total, page)), jnp.int32),
        k_format=fmt,
        v_format=fmt,
        **numbers,
        **scales,
    )
    table = 1 + rng.permutation(total - 1).reshape(rows, heads, width).astype(np.int32)
    table[3, :, 5:] = 0
    table[5] = 0
    q = draw(rows, heads * 4, dim)
    sinks = jnp.asarray(rng.standard_normal(heads * 4), jnp.float32)
    q_pos = jnp.full(rows, 4000, jnp.int32)
    options = {"scale": 0.125, "q_pos": q_pos, "window": 3000, "sinks": sinks}
    arguments = q, (pages,), (jnp.asarray(table),)
    skip_others_of_mosaic(implementation, *arguments)
    out, lse = paged_attention(*arguments, **options, implementation=implementation)
    expected_out, expected_lse, _ = paged_attention_reference((q,), *arguments[1:], **options)
    tolerance = 4e-3 if dtype == "bfloat16" else 1e-5 if fmt == "float" else 2e-4
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=tolerance)
    # XLA's gather rounds what the codes say to bfloat16.
    rounded = implementation == "xla" and dtype == "bfloat16" and fmt != "float"
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-2 if rounded else 1e-4)
    assert (out[5] == 0).all()


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize(("dtype", "dim", "page", "tokens"), STORES)
def test_write_slots(implementation, dtype, dim, page, tokens):
    arguments = problem(dtype, dim, page, tokens)
    expected = bits(oracle(**arguments))
    pool = arguments["pool"]
    store = jax.jit(functools.partial(write_slots, implementation=implementation), donate_argnums=0)
    where = pointers(pool)
    stored = store(*arguments.values())
    assert bits(stored) == expected
    assert pointers(stored) == where


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "dim", "tokens"), CODED)
def test_write_slots_codes(name, dim, tokens, dtype):
    """One launch against XLA's way, ten times the same; padding is NaN, and stays where it is."""
    arguments = coded.problem(name, dim, tokens, full=True, dtype=jnp.dtype(dtype))
    named = (functools.partial(write_slots, implementation=by) for by in ("triton", "xla"))
    triton, xla = map(jax.jit, named)
    stored = [triton(**arguments) for _ in range(RUNS)]
    coded.check(stored[0], xla(**arguments), arguments)
    found = [[x.tobytes() for x in coded.arrays(pool).values()] for pool in stored]
    assert all(again == found[0] for again in found)


@pytest.mark.parametrize("name", ["int4", "int2"])
def test_write_slots_of_the_benchmark(name):
    """In place, and as good as what XLA stores."""
    pool, _, arguments = store_arguments(name, StoreShape())
    stored = []
    for by in ("triton", "xla"):
        store = jax.jit(functools.partial(write_slots, implementation=by), donate_argnums=0)
        copy = jax.tree.map(jnp.copy, pool)
        where = pointers(copy)
        stored.append(store(copy, **arguments))
        assert pointers(stored[-1]) == where
    coded.check(*stored, {"pool": pool, **arguments})


@pytest.mark.parametrize(("tokens", "dim"), SEGMENTS)
def test_cluster_centers(tokens, dim):
    """At every level of a segment: the oracle's tokens where clusters are clear, and as near to
    their centers as XLA's where they are not; NaN in one row stays there, ten times the same."""
    size, rounds, broken = (8, 8), 4, 3
    real = np.arange(size[0]) != broken
    while (count := tokens // 2) >= 4:
        start = start_of(tokens, count)
        triton, xla = (
            jax.jit(functools.partial(cluster_centers, iterations=rounds, implementation=by))
            for by in ("triton", "xla")
        )
        for kind in ("clustered", "equal"):
            keys = keys_of(kind, tokens, count, dim, size=size)
            found = triton(jnp.asarray(keys).at[broken].set(jnp.nan), start)
            found = [np.asarray(part)[real] for part in found]
            assert compare(found, keys[real], count, rounds, 1e-3) == found[0][..., 0].size
        keys = jnp.asarray(keys_of("random", tokens, count, dim, size=size))
        near, apart = triton(keys, start)
        assert abs(apart.sum() / xla(keys, start)[1].sum() - 1) < 0.01
        assert (near.sum(-1) > 0).all() and (near.sum(-1) <= count).all()
        runs = [jax.device_get(triton(keys, start)) for _ in range(RUNS)]
        assert len({(near.tobytes(), apart.tobytes()) for near, apart in runs}) == 1
        tokens = count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_rotations_as_exact_as_float32(dim, dtype):
    x = jax.random.normal(jax.random.key(0), (33, 8, dim), dtype)
    exact = np.asarray(x, np.float64)
    found = np.asarray(jax.jit(rotate)(x), np.float64)
    np.testing.assert_allclose(found, exact @ rotation(dim).astype(np.float64), rtol=0, atol=1e-5)
    back = np.asarray(jax.jit(unrotate)(jnp.asarray(found, jnp.float32)))
    np.testing.assert_allclose(back, exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("fmt", "pages"), [("float", 3 * 2**19), ("int8", 2**22 + 1)], ids=str)
def test_pools_of_gigabytes(fmt, pages):
    """3 GiB of bfloat16, in 32-bit offsets, and 4 GiB of bytes, in 64-bit ones."""
    rows, tokens, page, dim = 2, 16, 16, 64
    numbers = jnp.bfloat16 if fmt == "float" else jnp.uint8
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((rows, 1, tokens, dim)), jnp.bfloat16) for _ in "kv")
    q = jnp.asarray(rng.standard_normal((rows, 4, dim)), jnp.bfloat16)

    def attend(count, first):
        scale = jnp.zeros((count, page), jnp.float16)
        pool = KVPages(
            k=jnp.zeros((count, page, dim), numbers),
            v=jnp.zeros((count, dim, page), numbers),
            bias=jnp.full((count, page), -jnp.inf),
            pos=jnp.full((count, page), -1, jnp.int32),
            k_scale=None if fmt == "float" else scale[:, :, None],
            v_scale=None if fmt == "float" else scale[:, None],
            k_format=fmt,
            v_format=fmt,
            rotated=fmt != "float",
        )
        table = first + jnp.arange(rows, dtype=jnp.int32).reshape(rows, 1, 1)
        at = jnp.broadcast_to(table, (rows, 1, tokens))
        slots = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), at.shape)
        pos = jnp.zeros((rows, tokens), jnp.int32)
        store = jax.jit(functools.partial(write_slots, implementation="triton"), donate_argnums=0)
        pool = store(pool, at, slots, k, v, pos)
        return paged_attention(q, [pool], [table], scale=0.1, implementation="triton")

    for large, small in zip(attend(pages, pages - rows), attend(5, 1), strict=True):
        np.testing.assert_array_equal(large, small)
        assert np.isfinite(large).all() and (large != 0).all()


def test_small_for_a_sanitizer():
    """One small case of each op, and of XLA's nothing but what surrounds them."""
    case = dataclasses.replace(WIDE, head_dim=64, fmt="int4", basis=True)
    problem = cases.build(case)
    cases.check(attend(problem, "triton"), problem)
    arguments = coded.problem("k4v2", 64, 17, full=True)
    stored = jax.jit(functools.partial(write_slots, implementation="triton"))(**arguments)
    assert np.isneginf(np.asarray(stored.bias)[SCRATCH_PAGE]).all()
