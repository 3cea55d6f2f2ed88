"""Keys of segments to cluster, and which of their tokens are nearest to a center in float64."""

import jax.numpy as jnp
import numpy as np

from tests.thoughts import kept

ROWS, HEADS = 2, 2
KINDS = ("random", "clustered", "repeated", "equal")


def start_of(tokens: int, count: int):
    return jnp.asarray(kept.spaced(tokens, count), jnp.int32)


def keys_of(kind: str, tokens: int, count: int, dim: int, seed: int = 0, size=(ROWS, HEADS)):
    """Keys [*size, tokens, dim] in float32.

    Args:
        kind: "clustered" keys are around ``count`` points far from each other; "repeated" ones are
            whole numbers, so that float32 and float64 see the same ties.
    """
    rng = np.random.default_rng(seed)
    shape = (*size, tokens, dim)
    if kind == "random":
        return rng.standard_normal(shape).astype(np.float32)
    if kind == "equal":
        return np.broadcast_to(rng.standard_normal((*size, 1, dim)), shape).astype(np.float32)
    if kind == "repeated":
        points = rng.integers(-100, 100, (count, dim))
        return points[rng.integers(count, size=shape[:3])].astype(np.float32)
    points = 10 * rng.standard_normal((*size, count, dim))
    at = np.arange(tokens) * count // tokens
    return (points[:, :, at] + 0.3 * rng.standard_normal(shape)).astype(np.float32)


def chosen(near, apart, count: int) -> list[int]:
    """Tokens nearest to a center, and for clusters without any those farthest from theirs."""
    score = np.where(near, np.inf, np.asarray(apart, np.float64))
    return sorted(sorted(range(len(score)), key=lambda t: (-score[t], t))[:count])


def compare(found, keys, count: int, rounds: int, least: float) -> int:
    """Compare heads whose every decision is clear with the oracle; returns how many there were."""
    near, apart, clear = *map(np.asarray, found), 0
    for row, head in np.ndindex(near.shape[:2]):
        exact = np.asarray(keys[row, head], np.float64)
        expected, margin = kept.by_clusters(exact, count, rounds)
        if margin > least:
            assert chosen(near[row, head], apart[row, head], count) == expected
            clear += 1
    return clear
