"""Sparsity of one step in plain NumPy, one number at a time, from its definition."""

import numpy as np


def sparsity(q: np.ndarray, k: np.ndarray, seen: np.ndarray, scale: float) -> float:
    """Of one query: q [Hq, D], k [S, Hkv, D], seen [S], in float64; only seen keys are read."""
    keys = np.flatnonzero(seen)
    if not len(keys):
        return 0.0
    heads, groups = len(q), k.shape[1]
    per_group = heads // groups
    total = np.zeros(len(keys))
    for group in range(groups):
        pooled = []
        for key in keys:
            of_heads = [
                scale * float(np.dot(q[group * per_group + i].astype(np.float64), k[key, group]))
                for i in range(per_group)
            ]
            pooled.append(max(of_heads))
        weights = [np.exp(logit - max(pooled)) for logit in pooled]
        total += np.array(weights) / sum(weights)
    mean = total / groups
    return sum(weight < mean.max() / 100 for weight in mean) / len(keys)


def all_rows(q, k, mask, scale) -> np.ndarray:
    """[B, T] of q [B, T, Hq, D], k [B, S, Hkv, D], mask [B, T, S]."""
    return np.array(
        [
            [sparsity(query, keys, seen, scale) for query, seen in zip(*row, strict=True)]
            for *row, keys in zip(q, mask, k, strict=True)
        ]
    )
