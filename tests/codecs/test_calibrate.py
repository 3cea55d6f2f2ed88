"""The constants of a key basis against loops."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.codecs import KeyBasis, key_basis


def keys(tokens: int = 30, heads: int = 3, dim: int = 12) -> np.ndarray:
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.normal(size=(heads, dim)))
    return (rng.standard_normal((tokens, heads, dim)) + rng.normal(size=(heads, dim)) * 4) * sizes


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_mean_and_balance(center, dtype):
    k = jnp.asarray(keys(), dtype)
    basis = key_basis(k, center=center, balance=True)
    exact = np.asarray(k).astype(np.float64)
    for head in range(3):
        roots = []
        for channel in range(12):
            numbers = exact[:, head, channel]
            mean = numbers.sum() / len(numbers)
            if center:
                np.testing.assert_allclose(basis.mean[head, channel], mean, rtol=1e-4, atol=1e-5)
                numbers = numbers - mean
            roots.append(math.sqrt(max(abs(numbers))))
        middle = math.prod(roots) ** (1 / 12)
        np.testing.assert_allclose(basis.balance[head], np.array(roots) / middle, rtol=1e-3)
    assert (basis.mean is None) == (not center)
    assert basis.balance.dtype == jnp.float32


def test_only_what_is_asked_for():
    k = jnp.asarray(keys(), jnp.float32)
    assert key_basis(k, center=False, balance=False) == KeyBasis(None, None)
    basis = key_basis(k, center=True, balance=False)
    assert basis.balance is None
    np.testing.assert_allclose(basis.mean, keys().mean(0), rtol=0, atol=1e-4)


def test_a_dead_channel_does_not_blow_up():
    k = keys()
    k[:, 0, 3] = 0
    k[:, 1, 4] = 7.5  # constant: dead once it is centred
    k[:, 2] = 0
    balance = np.asarray(key_basis(jnp.asarray(k, jnp.float32), center=True, balance=True).balance)
    assert np.isfinite(balance).all()
    np.testing.assert_allclose(np.log(balance).mean(-1), 0, atol=1e-5)
    np.testing.assert_allclose(balance.max(-1)[:2] / balance.min(-1)[:2], math.sqrt(1e3), rtol=1e-3)
    assert balance[0].argmin() == 3 and balance[1].argmin() == 4
    np.testing.assert_array_equal(balance[2], 1)
