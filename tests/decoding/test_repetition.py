"""Loops against a search by brute force."""

import random

import pytest

from kvjax.decoding.repetition import COVERED, LONGEST_LOOP, LoopWatch


def first_loop(tokens: list[int]) -> int | None:
    """How many tokens have come when a loop first covers as many as it takes."""
    for end in range(COVERED, len(tokens) + 1):
        last = tokens[end - COVERED : end]
        for length in range(1, LONGEST_LOOP + 1):
            if last[length:] == last[:-length]:
                return end
    return None


def noticed(tokens: list[int]) -> int | None:
    """Whatever the parts are that they come in."""
    found = {_noticed(tokens, part) for part in (1, 7, 16, len(tokens))}
    (count,) = found
    return count


def _noticed(tokens: list[int], part: int) -> int | None:
    watch = LoopWatch()
    for start in range(0, len(tokens), part):
        watch, looping = watch.push(tokens[start : start + part])
        if looping is not None:
            return start + looping + 1
    return None


def test_the_limits():
    assert (LONGEST_LOOP, COVERED) == (64, 512)


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64])
def test_at_exactly_so_many_tokens(length):
    loop = list(range(length))
    stream = (loop * COVERED)[:COVERED]
    assert noticed(stream) == COVERED
    assert noticed(stream[:-1]) is None
    # One other token anywhere breaks it, also where it is the first or the last.
    for at in (0, 1, COVERED // 2, COVERED - 1):
        assert noticed([*stream[:at], 999, *stream[at + 1 :]]) is None


def test_longer_loops_are_none():
    assert noticed(list(range(65)) * 20) is None


@pytest.mark.parametrize("seed", range(8))
def test_random_streams(seed):
    """Loops of any length between stretches without any, some too short to count."""
    rng = random.Random(seed)
    stream: list[int] = []
    while len(stream) < 1300:
        stream += [rng.randrange(3) for _ in range(rng.randrange(1, 80))]
        loop = [rng.randrange(3) for _ in range(rng.choice([1, 2, 5, 40, 64, 65, 70]))]
        rounds = rng.choice([300, COVERED - 1, COVERED, COVERED + 5])
        stream += (loop * COVERED)[:rounds]
    assert noticed(stream) == first_loop(stream)


def test_a_watch_does_not_change():
    watch = LoopWatch()
    watch, looping = watch.push([5] * (COVERED - 1))
    assert looping is None
    assert watch.push([5])[1] == 0
    assert watch.push([6])[1] is None
    assert watch.push([])[1] is None
    assert watch.push([5])[1] == 0
