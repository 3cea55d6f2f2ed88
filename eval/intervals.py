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


def effective_count(answers: list[list[bool]]) -> float:
    """Independent answers that say as much as several to each problem do together.

    Samples of one problem resemble each other. What counts for the interval is how far problems
    are apart: with p right, n problems and the variance v of their shares, p (1 - p) n / v; between
    the number of problems and that of answers, and the former where all are right or none is.

    Args:
        answers: to every problem, which of its samples are right.
    """
    count, total = len(answers), sum(map(len, answers))
    shares = [sum(own) / len(own) for own in answers]
    right = sum(map(sum, answers)) / total
    if total == count or right in (0.0, 1.0) or count < 2:
        return count
    spread = sum((share - right) ** 2 for share in shares) / (count - 1)
    found = right * (1 - right) * count / spread if spread else total
    return min(max(found, count), total)
