"""What stays of a segment, token after token in float64: the oracle of ``kvjax.thoughts``."""

import numpy as np


def spaced(tokens: int, count: int) -> list[int]:
    """The middle token of each of ``count`` equally long stretches."""
    return [int((i + 0.5) * tokens / count) for i in range(count)]


def by_clusters(keys: np.ndarray, count: int, rounds: int) -> tuple[list[int], float]:
    """Indices of the tokens that K-means leaves, and how close the closest decision was.

    Exact ties are no close decisions: the earlier token, or center, has it. How close is relative
    to the squared distances that are compared.
    """
    tokens, margin = len(keys), np.inf
    centers = keys[spaced(tokens, count)]

    def assign():
        nonlocal margin
        apart = np.array([((keys - center) ** 2).sum(1) for center in centers]).T
        best, second = np.sort(apart, 1)[:, 0], np.sort(apart, 1)[:, 1:2]
        margin = min(margin, _closest(second - best[:, None], second))
        return apart.argmin(1), best

    for _ in range(rounds):
        mine, _ = assign()
        for c in range(count):
            if (mine == c).any():
                centers[c] = keys[mine == c].mean(0)
    mine, apart = assign()
    kept = []
    for c in range(count):
        members = [token for token in range(tokens) if mine[token] == c]
        if not members:
            continue
        least = min(apart[token] for token in members)
        # Rounded in float64: 1e-12 is a tie.
        kept.append(next(t for t in members if apart[t] <= least * (1 + 1e-12)))
        far = np.array([apart[t] for t in members])
        margin = min(margin, _closest(far - least, far))
    rest = sorted((-apart[t], t) for t in range(tokens) if t not in kept)
    spare = count - len(kept)
    if 0 < spare < len(rest):
        inside, outside = -rest[spare - 1][0], -rest[spare][0]
        margin = min(margin, _closest(np.array([inside - outside]), np.array([inside])))
    return sorted(kept + [token for _, token in rest[:spare]]), margin


def _closest(gaps: np.ndarray, sizes: np.ndarray) -> float:
    """The least gap relative to its size; one below 1e-12 is an exact tie."""
    share = gaps / np.maximum(sizes, 1e-300)
    return float(np.min(share, initial=np.inf, where=share > 1e-12))


def levels(tokens: int, schedule, choose) -> np.ndarray:
    """How many demotions each token survives; ``choose(alive, count)`` says which tokens stay."""
    alive, survived = list(range(tokens)), np.zeros(tokens, int)
    for level, count in enumerate(schedule, 1):
        if count < len(alive):
            alive = choose(alive, count)
        survived[alive] = level
    return survived


def kmeans_levels(keys: np.ndarray, schedule, rounds: int = 4) -> tuple[np.ndarray, float]:
    """Of keys [T, D], and how close the closest decision was."""
    margins = [np.inf]
    keys = np.asarray(keys, np.float64)

    def choose(alive, count):
        if not count:
            return []
        kept, margin = by_clusters(keys[alive], count, rounds)
        margins.append(margin)
        return [alive[i] for i in kept]

    return levels(len(keys), schedule, choose), min(margins)
