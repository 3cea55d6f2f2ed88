"""Single steps of the search; ``tests/compress/test_quota_selectors.py`` compares whole ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.matching.omp import omp

MASSES = np.array([[1, 0.1, 0.5, 0.4], [1, 0.1, 0.6, 0], [1, 1, 0, 0]], np.float32)
MASS = np.array([4, 4, 0.1], np.float32)


def places(candidates, total=2, cutoff=None) -> list[int]:
    run = functools.partial(omp, count=3, cutoff=cutoff)
    arrays = jnp.asarray(MASSES), jnp.asarray(MASS), jnp.asarray(candidates, bool)
    return np.asarray(jax.jit(run)(*arrays, jnp.int32(total))).tolist()


def test_too_much_mass_is_not_what_is_missing():
    """The first leaves (1.3, 1.3, -2.6): slot 1 has the largest product, but it is negative."""
    left = MASS - MASSES[:, 0] * (MASSES[:, 0] @ MASS) / 3
    worth = MASSES.T @ left
    assert np.argmax(np.abs(worth[1:])) == 0 and worth[1] < 0 < worth[2]
    assert places([1, 1, 1, 1])[:3] == [0, 4, 1]


def test_only_candidates_are_picked_as_far_as_there_are_any():
    assert places([0, 1, 0, 1], cutoff=-7.0) == [4, 1, 4, 0]
    assert places([0, 0, 0, 0], cutoff=-7.0) == [4, 4, 4, 4]
