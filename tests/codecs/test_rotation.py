"""The rotation of the head dimension."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.codecs import rotate, rotation, unrotate
from pallas_kernels.rotation import in_halves

SIZES = [1, 2, 5, 12, 64, 80, 96, 128, 192]


def entry(row: int, column: int, size: int) -> float:
    """One number of the matrix: a sign by common bits, times a cosine of the odd part."""
    odd = size
    while odd % 2 == 0:
        odd //= 2
    sign = (-1) ** ((row // odd) & (column // odd)).bit_count()
    time, frequency = row % odd, column % odd
    wave = math.cos(math.pi * (time + 0.5) * frequency / odd)
    return sign * wave * math.sqrt((1 if frequency == 0 else 2) / size)


@pytest.mark.parametrize("size", SIZES)
def test_the_matrix(size):
    matrix = rotation(size)
    assert matrix.dtype == np.float32 and not matrix.flags.writeable
    expected = [[entry(row, column, size) for column in range(size)] for row in range(size)]
    np.testing.assert_allclose(matrix, expected, rtol=0, atol=1e-6)
    exact = matrix.astype(np.float64)
    np.testing.assert_allclose(exact @ exact.T, np.eye(size), rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_are_kept_and_rotations_undone(size, dtype):
    rng = np.random.default_rng(size)
    q, k = (jnp.asarray(rng.standard_normal((2, 3, size)), dtype) for _ in range(2))
    turned = rotate(k)
    assert turned.dtype == jnp.float32
    exact_q, exact_k = (np.asarray(x).astype(np.float64) for x in (q, k))
    np.testing.assert_allclose(turned, exact_k @ rotation(size), rtol=0, atol=1e-5)
    np.testing.assert_allclose(unrotate(turned), exact_k, rtol=0, atol=1e-5)
    products = (np.asarray(rotate(q)) * np.asarray(turned)).sum(-1)
    np.testing.assert_allclose(products, (exact_q * exact_k).sum(-1), rtol=0, atol=1e-4)


def test_halves_make_the_whole_product():
    """What GPUs compute in two products that round what they multiply to TF32."""
    x = np.random.default_rng(0).standard_normal((7, 64)).astype(np.float32)
    signs = np.sign(rotation(64))
    found = in_halves("...d,de->...e", jnp.asarray(x), jnp.asarray(signs))
    np.testing.assert_allclose(found, x.astype(np.float64) @ signs, rtol=0, atol=1e-5)


def test_one_large_channel_is_spread():
    for size in (64, 80, 96):
        turned = np.asarray(rotate(jnp.eye(size)))
        assert abs(turned).max() < math.sqrt(2 / size) * 1.001
