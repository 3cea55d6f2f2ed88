"""``write_slots`` of tokens that it codes: one launch against XLA's way, which the codecs' tests
compare with loops, and what neither may touch."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import SCRATCH_PAGE, write_slots
from pallas_kernels.layout import UNKNOWN_LEVEL
from pallas_kernels.read import plain_keys, plain_values
from pallas_kernels.rotation import rotation
from pallas_kernels.write_slots.triton import write_slots_triton
from pallas_kernels.write_slots.xla import write_slots_xla
from tests.kernels.coded import FORMATS, HEADS, PAGE, PAGES, ROWS, arrays, check, problem

TOKENS = (1, 15, 16, 17)
IN_SHORT = {("k4v2", 256), ("int4", 128), ("fp8", 128)}
CASES = [
    pytest.param(
        *(name, dim, tokens, bool((i + j) % 2)),
        marks=[] if dim == 64 or (name, dim) in IN_SHORT else [pytest.mark.slow],
    )
    for (i, name), (j, dim) in itertools.product(enumerate(FORMATS), enumerate((64, 128, 256)))
    for tokens in (TOKENS[(i + j) % 4], TOKENS[(i + j + 2) % 4])[: 1 + (dim == 64)]
]
STEPS = {"fp8": 0.07, "int8": 0.02, "int4": 0.25, "int2": 0.8}  # of the largest number
# Every case is compiled to be run once.
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
triton = quick(functools.partial(write_slots_triton, interpret=True))
xla = quick(write_slots_xla)


@pytest.mark.parametrize(("name", "dim", "tokens", "full"), CASES)
def test_one_launch_stores_what_xla_does(unchecked, name, dim, tokens, full):
    arguments = problem(name, dim, tokens, full=full)
    stored, expected = triton(**arguments), xla(**arguments)
    check(stored, expected, arguments)
    check(expected, expected, arguments, scratch=True)
    for pool in (stored, expected):
        bias, where = np.asarray(pool.bias), np.asarray(pool.pos)
        assert np.isneginf(bias[SCRATCH_PAGE]).all() and (where[SCRATCH_PAGE] == -1).all()
        numbers = (np.asarray(x).astype(np.float32) for x in (pool.k, pool.v))
        assert all(np.isfinite(x[SCRATCH_PAGE]).all() for x in numbers)
    if full:
        kept = np.asarray(arguments["pages"]) != SCRATCH_PAGE
        at = tuple(np.asarray(arguments[part])[kept] for part in ("pages", "slots"))
        mass, level = np.asarray(stored.mass), np.asarray(stored.level)
        np.testing.assert_array_equal(mass[at], np.asarray(arguments["mass"])[kept])
        assert (level[at] == UNKNOWN_LEVEL).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_stored_reads_back(name, dtype):
    """Against the tokens themselves, in plain NumPy."""
    arguments = problem(name, 64, 17, full=True, dtype=jnp.dtype(dtype))
    stored = triton(**arguments)
    table = jnp.arange(PAGES, dtype=jnp.int32).reshape(1, 1, PAGES)
    for head in range(HEADS):
        basis = {n: getattr(stored, n) for n in ("mean", "balance")}
        own = {n: None if x is None else x[head : head + 1] for n, x in basis.items()}
        mine = dataclasses.replace(stored, **own)
        for side, read in (("k", plain_keys), ("v", plain_values)):
            found = np.asarray(read(mine, table, jnp.float32))[0, 0]
            width = 1.0 if side == "v" or own["balance"] is None else np.asarray(own["balance"])[0]
            mean = 0.0 if side == "v" or own["mean"] is None else np.asarray(own["mean"])[0]
            for row, token in np.ndindex(ROWS, arguments["k"].shape[2]):
                page, slot = (int(arguments[n][row, head, token]) for n in ("pages", "slots"))
                if page == SCRATCH_PAGE:
                    continue
                token = np.asarray(arguments[side][row, head, token], np.float32)
                error = (found[page, slot] - token) / width
                inside = (token - mean) / width
                turned = inside @ rotation(64) if stored.rotated else inside
                fmt = getattr(stored, f"{side}_format")
                most = abs(turned).max() * STEPS.get(fmt, 0.005 if dtype == "bfloat16" else 1e-5)
                error = error @ rotation(64) if stored.rotated else error
                assert abs(error).max() <= most + 1e-5


def test_the_public_op_codes_on_a_cpu():
    arguments = problem("fp8", 64, 5, full=True)
    stored, expected = quick(write_slots)(**arguments), xla(**arguments)
    for name, array in arrays(stored).items():
        assert array.tobytes() == arrays(expected)[name].tobytes()
    check(
        triton(**(arguments | {"mass": None})),
        write_slots(**(arguments | {"mass": None})),
        arguments,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v_zero": jnp.zeros((PAGES, 1, PAGE), jnp.float16)}, "share scales or have a zero point"),
        ({"k_scale": jnp.zeros((PAGES, 1, 64), jnp.float16)}, "share scales or have a zero point"),
        ({"k_format": "e2m1"}, "share scales or have a zero point"),
        ({"k": jnp.zeros((PAGES, PAGE, 16), jnp.uint8)}, r"holds \(32, 64\) channels"),
    ],
)
def test_pools_that_tokens_cannot_be_coded_for(unchecked, change, message):
    arguments = problem("int4", 64, 2)
    pool = dataclasses.replace(arguments["pool"], **change)
    with pytest.raises(ValueError, match=message):
        write_slots(**(arguments | {"pool": pool}))


def test_codes_where_numbers_are_wanted(unchecked):
    arguments = problem("int4", 64, 2)
    codes = {name: jnp.zeros((ROWS, HEADS, 2, 64), jnp.uint8) for name in "kv"}
    with pytest.raises(ValueError, match=r"must be floats, got k.dtype=dtype\('uint8'\)"):
        write_slots(**(arguments | codes))


@pytest.mark.parametrize(("name", "dim"), [("int4", 96), ("int2", 32), ("int8", 8)])
def test_head_sizes_that_the_launch_cannot_code(name, dim):
    arguments = problem(name, dim, 3)
    with pytest.raises(NotImplementedError, match=f"power of two .* got {dim}"):
        write_slots(**arguments, implementation="triton")
    check(quick(write_slots)(**arguments), xla(**arguments), arguments, scratch=True)


def test_the_launch_takes_no_codes(unchecked):
    """Grouped codecs make them, and store them with XLA's scatters."""
    arguments = problem("int4", 64, 2)
    codes = {name: jnp.zeros((ROWS, HEADS, 2, 32), jnp.uint8) for name in "kv"}
    scales = {f"{name}_scale": jnp.ones((ROWS, HEADS, 2, 1), jnp.float16) for name in "kv"}
    with pytest.raises(NotImplementedError, match="no codes that are made already"):
        write_slots(**(arguments | codes), **scales, implementation="triton")
    stored = write_slots(**(arguments | codes), **scales)
    kept = np.asarray(arguments["pages"]) != SCRATCH_PAGE
    at = tuple(np.asarray(arguments[part])[kept] for part in ("pages", "slots"))
    assert (np.asarray(stored.k)[at] == 0).all() and (np.asarray(stored.k_scale)[at] == 1).all()
