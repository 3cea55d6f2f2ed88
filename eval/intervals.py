"""How sure a count of right answers is."""

import math


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson's score interval)."""
    z = 1.959964
    share = right / count
    middle = share + z**2 / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    low, high = ((middle + sign * half) / (1 + z**2 / count) for sign in (-1, 1))
    return max(low, 0.0), min(high, 1.0)


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value that two methods answer equally well.

    Args:
        only_first: problems that only the first answers right.
        only_second: those that only the second does.
    """
    count = only_first + only_second
    tail = sum(math.comb(count, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**count)
