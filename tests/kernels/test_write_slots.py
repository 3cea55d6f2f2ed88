"""``write_slots`` of every backend against NumPy, bit for bit, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import SCRATCH_PAGE, KVPages, write_slots
from pallas_kernels.write_slots.triton import write_slots_triton
from pallas_kernels.write_slots.xla import write_slots_xla
from tests.kernels.stores import SHAPES, bits, oracle, pointers, problem

BACKENDS = {
    "triton": functools.partial(write_slots_triton, interpret=True),
    "xla": write_slots_xla,
    "public": write_slots,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "dim", "page", "tokens"),
    SHAPES,
)
def test_stores_what_was_given_and_nothing_else(backend, dtype, dim, page, tokens):
    arguments = problem(dtype, dim, page, tokens)
    before, expected = bits(arguments["pool"]), bits(oracle(**arguments))
    stored = jax.jit(BACKENDS[backend])(*arguments.values())
    assert bits(stored) == expected != before
    assert np.isneginf(stored.bias[SCRATCH_PAGE]).all()
    assert np.isfinite(np.asarray(stored.k, np.float32)).all()
    assert bits(arguments["pool"]) == before, "the pool was not donated, so it must survive"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [12, 96])
def test_any_head_size(backend, dim):
    arguments = problem("float32", dim, 4, 3)
    assert bits(BACKENDS[backend](**arguments)) == bits(oracle(**arguments))


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_may_hold_anything(backend):
    arguments = problem("float32", 16, 16, 5)
    expected = bits(oracle(**arguments))
    padding = (arguments["pages"] == SCRATCH_PAGE)[..., None]
    broken = {name: jnp.where(padding, jnp.nan, arguments[name]) for name in ("k", "v")}
    stored = BACKENDS[backend](**(arguments | broken))
    assert bits(stored) == expected
    assert all(np.isfinite(array[SCRATCH_PAGE]).all() for array in (stored.k, stored.v))


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_tokens_may_go_to_one_scratch_slot(backend):
    arguments = problem("float32", 16, 16, 4)
    pages = arguments["pages"].at[:, :, 1:].set(SCRATCH_PAGE)
    arguments |= {"pages": pages, "slots": jnp.where(pages == SCRATCH_PAGE, 3, arguments["slots"])}
    stored = BACKENDS[backend](**arguments)
    assert bits(stored) == bits(oracle(**arguments))
    assert np.isneginf(stored.bias[SCRATCH_PAGE]).all()
    assert stored.pos[SCRATCH_PAGE, 3] == -1


def test_in_place_where_the_pool_is_donated():
    arguments = problem("float32", 16, 16, 2)
    pool = arguments["pool"]
    where = pointers(pool)
    stored = jax.jit(write_slots, donate_argnums=0)(*arguments.values())
    assert pointers(stored) == where
    assert pool.k.is_deleted()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("v", lambda x: x[:, :, :1], r"k.shape=\(3, 2, 2, 16\) v.shape=\(3, 2, 1, 16\)"),
        ("pages", lambda x: x[:2], r"pages.shape=\(2, 2, 2\)"),
        ("slots", lambda x: x[:, :1], r"slots.shape=\(3, 1, 2\)"),
        ("pos", lambda x: x[:, :1], r"pos must be \(3, 2\), got pos.shape=\(3, 1\)"),
        ("k", lambda x: x.astype(jnp.bfloat16), r"k.dtype=dtype\(bfloat16\)"),
        ("v", lambda x: x.astype(jnp.bfloat16), r"v.dtype=dtype\(bfloat16\)"),
    ],
)
def test_arguments_that_do_not_fit_together(unchecked, name, change, message):
    arguments = problem("float32", 16, 16, 2)
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        write_slots(**arguments)


def test_a_head_size_or_dtype_other_than_the_pools(unchecked):
    arguments = problem("float32", 16, 16, 2)
    wide = problem("float32", 32, 16, 2)
    with pytest.raises(ValueError, match=r"pool.k must be \(.., .., 32\) .* got .*\(9, 16, 16\)"):
        write_slots(**(arguments | {"k": wide["k"], "v": wide["v"]}))
    half = {name: arguments[name].astype(jnp.bfloat16) for name in ("k", "v")}
    with pytest.raises(ValueError, match=r"dtypes must agree, got pool.k.dtype=dtype.'float32'"):
        write_slots(**(arguments | half))


def test_backends_that_cannot_or_do_not_exist(unchecked):
    with pytest.raises(ValueError, match=r"implementation .* got 'mosaic'"):
        write_slots(**problem("float32", 16, 4, 3), implementation="mosaic")


@pytest.mark.parametrize(
    ("pages", "dtype", "fits"),
    [
        (2**21, jnp.float8_e4m3fn, True),
        (2**21 + 1, jnp.float8_e4m3fn, False),
        (2**22, jnp.float8_e4m3fn, False),
        (2**22 + 1, jnp.float8_e4m3fn, True),
        (2**20, jnp.bfloat16, True),
        (2**21, jnp.bfloat16, True),
        (2**21 + 1, jnp.bfloat16, True),
    ],
)
def test_pools_beyond_the_kernels_offsets_take_the_other_backend(unchecked, pages, dtype, fits):
    """It counts elements in 32 signed bits up to 4 GiB, and in 64 beyond."""

    def shape(*sizes, dtype=dtype):
        return jax.ShapeDtypeStruct(sizes, dtype)

    pool = KVPages(
        shape(pages, 16, 64),
        shape(pages, 64, 16),
        shape(pages, 16, dtype=jnp.float32),
        shape(pages, 16, dtype=jnp.int32),
    )
    places, heads = shape(2, 2, 1, dtype=jnp.int32), shape(2, 2, 1, 64)
    arguments = pool, places, places, heads, heads, shape(2, 1, dtype=jnp.int32)
    assert ("pallas_call" in str(jax.make_jaxpr(write_slots)(*arguments))) == fits
    named = functools.partial(write_slots, implementation="triton")
    if fits:
        jax.make_jaxpr(named)(*arguments)
    else:
        with pytest.raises(NotImplementedError, match=r"\d{10} bytes in one array overflow"):
            jax.make_jaxpr(named)(*arguments)
