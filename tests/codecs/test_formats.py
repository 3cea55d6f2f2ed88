"""What every byte says in every format, and where its codes lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import PER_BYTE, code_levels, levels, pack, unpack
from tests.codecs import oracles

BYTES = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize("fmt", PER_BYTE)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_every_byte(fmt, axis):
    planes = PER_BYTE[fmt]
    codes = np.stack([BYTES, BYTES[::-1]], 1 - axis % 2)  # [256, 2] or [2, 256]
    actual = np.asarray(jax.jit(levels, static_argnums=(1, 2))(codes, fmt, axis))
    assert actual.dtype == np.float32
    expected = np.empty_like(actual)
    for row, start in enumerate((BYTES, BYTES[::-1])):
        for byte, value in enumerate(start.tolist()):
            for plane in range(planes):
                code = (value // 2 ** (plane * 8 // planes)) % 2 ** (8 // planes)
                channel = byte + plane * 256
                at = (channel, row) if axis == 0 else (row, channel)
                expected[at] = oracles.level(code, fmt)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("fmt", PER_BYTE)
@pytest.mark.parametrize(("shape", "axis"), [((3, 2, 12), -1), ((2, 20, 3), 1), ((4, 1), 0)])
def test_packing_is_undone(fmt, shape, axis):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2 ** (8 // PER_BYTE[fmt]), shape).astype(np.uint8)
    packed = pack(jnp.asarray(codes), fmt, axis)
    assert packed.dtype == jnp.uint8
    assert packed.size * PER_BYTE[fmt] == codes.size
    np.testing.assert_array_equal(unpack(packed, fmt, axis), codes)
    np.testing.assert_array_equal(
        levels(packed, fmt, axis), np.asarray(code_levels(jnp.asarray(codes), fmt))
    )


def test_float8_can_be_stored_into_place():
    pool = jnp.zeros((4, 3), jnp.float8_e4m3fn)
    new = jnp.asarray([1.5, -448], jnp.float8_e4m3fn)
    stored = jax.jit(lambda pool: pool.at[jnp.asarray([3, 1]), 2].set(new))(pool)
    expected = np.zeros((4, 3), np.float32)
    expected[3, 2], expected[1, 2] = 1.5, -448
    np.testing.assert_array_equal(np.asarray(stored).astype(np.float32), expected)
