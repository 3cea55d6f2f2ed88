"""Both ops as a GPU runs them. `make venv`, `.venv/bin/pip install -e .[cuda]`, then
`.venv/bin/python -m pytest -m gpu tests/gpu`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVPages, paged_attention, write_slots
from pallas_kernels.formats import PER_BYTE, middle
from pallas_kernels.paged_attention.reference import paged_attention_reference
from tests.kernels import cases
from tests.kernels.cases import Case
from tests.kernels.stores import SHAPES, bits, oracle, pointers, problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason=f"no NVIDIA GPU. {__doc__}"),
]
WIDE = Case(head_dim=128, group=4, page=64, dtype="bfloat16", lengths="empty between full")
BACKENDS = ["triton", "xla", None]


def attend(problem: cases.Problem, implementation):
    options = {"scale": problem.scale, "window": problem.window, "with_mass": True}
    fn = functools.partial(paged_attention, implementation=implementation, **options)
    arrays = {"q_pos": problem.q_pos, "sinks": problem.sinks}
    return jax.jit(lambda q, pools, tables, arrays: fn(q, pools, tables, **arrays))(
        problem.q, problem.pools, problem.tables, arrays
    )


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize(
    "case",
    [
        *cases.covering(head_dim=(64, 96, 128, 256), page=(16, 32, 64, 128)),
        *(dataclasses.replace(WIDE, fmt=fmt) for fmt in cases.AXES["fmt"]),
    ],
    ids=str,
)
def test_paged_attention(case, implementation):
    problem = cases.build(case)
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


@pytest.mark.parametrize("fmt", ["float", "int8", "int4", "int2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["triton", "xla"])
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
    out, lse = paged_attention(*arguments, **options, implementation=implementation)
    expected_out, expected_lse, _ = paged_attention_reference((q,), *arguments[1:], **options)
    tolerance = 4e-3 if dtype == "bfloat16" else 1e-5 if fmt == "float" else 2e-4
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=tolerance)
    # XLA's gather rounds what the codes say to bfloat16.
    rounded = implementation == "xla" and dtype == "bfloat16" and fmt != "float"
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=5e-3 if rounded else 1e-4)
    assert (out[5] == 0).all()


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "dim", "page", "tokens"),
    SHAPES,
)
def test_write_slots(implementation, dtype, dim, page, tokens):
    arguments = problem(dtype, dim, page, tokens)
    expected = bits(oracle(**arguments))
    pool = arguments["pool"]
    store = jax.jit(functools.partial(write_slots, implementation=implementation), donate_argnums=0)
    where = pointers(pool)
    stored = store(*arguments.values())
    assert bits(stored) == expected
    assert pointers(stored) == where
