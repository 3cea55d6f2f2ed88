"""The sparsity of attention against its definition, and what must not be read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.thoughts import sparsity
from kvjax.thoughts.sparsity import QUERY_BLOCK, dense_sparsity
from tests.thoughts import oracles

SHAPES = [  # B, T, S, Hq, Hkv, D
    (1, 1, 1, 1, 1, 2),
    (2, 5, 33, 9, 3, 8),
    (3, 4, 70, 8, 1, 16),
    (1, 7, 19, 4, 4, 6),
    (1, QUERY_BLOCK + 3, 21, 6, 2, 4),  # more than one block, and a rest
]


def inputs(shape, seed: int = 0, spread: float = 2.0):
    """Ragged masks; what nobody of a row sees is NaN."""
    batch, length, keys, heads, groups, dim = shape
    rng = np.random.default_rng([seed, *shape])
    q = spread * rng.standard_normal((batch, length, heads, dim), np.float32)
    k = spread * rng.standard_normal((batch, keys, groups, dim), np.float32)
    first = rng.integers(0, keys, (batch, length))
    last = rng.integers(0, keys, (batch, length))
    at = np.arange(keys)
    mask = (at >= np.minimum(first, last)[..., None]) & (at <= np.maximum(first, last)[..., None])
    mask &= rng.random(mask.shape) < 0.9
    k[~mask.any(1)] = np.nan
    return q, k, mask


def measured(q, k, mask, scale: float = 0.4) -> np.ndarray:
    return np.asarray(jax.jit(dense_sparsity, static_argnums=3)(q, k, mask, scale))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_query_has_the_sparsity_of_its_definition(shape):
    q, k, mask = inputs(shape)
    found = measured(q, k, mask)
    assert found.dtype == np.float32 and found.shape == shape[:2]
    np.testing.assert_allclose(found, oracles.all_rows(q, k, mask, 0.4), atol=1e-6)


def error_with(monkeypatch, change) -> np.ndarray:
    """How far off the oracle the function is with one of its steps changed."""
    q, k, mask = inputs(SHAPES[1])
    with monkeypatch.context() as patch:
        change(patch)
        found = np.asarray(dense_sparsity(jnp.asarray(q), jnp.asarray(k), jnp.asarray(mask), 0.4))
    return np.abs(found - oracles.all_rows(q, k, mask, 0.4)).max()


class Wrong:
    """An array whose maximum over heads, or mean over groups, is something else."""

    def __init__(self, array, **replaced):
        self.array, self.replaced = array, replaced

    def max(self, axis):
        return self.replaced.get("max", lambda a: a.max(axis))(self.array)

    def mean(self, axis):
        return self.replaced.get("mean", lambda a: a.mean(axis))(self.array)


def test_a_mean_over_the_heads_of_a_group_is_caught(monkeypatch):
    exact = sparsity.einsum_float32

    def change(patch):
        wrong = lambda *args: Wrong(exact(*args), max=lambda a: a.mean(2))  # noqa: E731
        patch.setattr(sparsity, "einsum_float32", wrong)

    assert error_with(monkeypatch, change) > 0.05


def test_a_maximum_over_groups_is_caught(monkeypatch):
    exact = jax.nn.softmax

    def change(patch):
        wrong = lambda *args: Wrong(exact(*args), mean=lambda a: a.max(1))  # noqa: E731
        patch.setattr(jax.nn, "softmax", wrong)

    assert error_with(monkeypatch, change) > 0.05


def test_another_border_than_one_per_cent_is_caught(monkeypatch):
    assert error_with(monkeypatch, lambda p: p.setattr(sparsity, "NEGLIGIBLE", 0.02)) > 0.01


def test_only_visible_keys_are_counted():
    q, k, mask = inputs((1, 6, 40, 4, 2, 8))
    more = np.full((1, 60, 2, 8), np.nan, np.float32)
    wide = np.concatenate([mask, np.zeros((1, 6, 60), bool)], 2)
    np.testing.assert_array_equal(
        measured(q, np.concatenate([k, more], 1), wide), measured(q, k, mask)
    )


def test_nothing_seen_is_no_sparsity_and_nan_seen_is_nan():
    q, k, mask = inputs((1, 3, 12, 4, 2, 8))
    k = np.nan_to_num(k, nan=1.0)
    mask[0] = [[False] * 12, [True] * 6 + [False] * 6, [True] * 12]
    k[0, 9] = np.nan
    found = measured(q, k, mask)[0]
    assert found[0] == 0 and np.isfinite(found[1]) and np.isnan(found[2])


def test_equal_keys_are_never_sparse_and_one_strong_key_leaves_the_rest():
    k = np.ones((1, 50, 1, 4), np.float32)
    q = np.ones((1, 1, 2, 4), np.float32)
    mask = np.ones((1, 1, 50), bool)
    assert measured(q, k, mask) == 0
    k[0, 7] = 10
    np.testing.assert_allclose(measured(q, k, mask), 49 / 50)


def test_bfloat16_activations_are_measured_in_float32():
    q, k, mask = inputs((1, 4, 30, 4, 2, 8))
    low = [jnp.asarray(array, jnp.bfloat16) for array in (q, k)]
    wide = [np.asarray(array, np.float32) for array in low]
    np.testing.assert_allclose(measured(*low, mask), oracles.all_rows(*wide, mask, 0.4), atol=1e-6)


def test_logits_exist_for_one_block_of_queries():
    shape = {"q": (1, 4096, 9, 64), "k": (1, 4096, 3, 64), "mask": (1, 4096, 4096)}
    kinds = {"q": jnp.float32, "k": jnp.float32, "mask": jnp.bool_}
    args = [jax.ShapeDtypeStruct(shape[name], kinds[name]) for name in shape]
    compiled = jax.jit(dense_sparsity, static_argnums=3).lower(*args, 0.125).compile()
    every_logit = 9 * 4096 * 4096 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < every_logit / 4
