"""Quotas against a plain sort, by hand, and what must hold of all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.errors import UsageError
from kvjax.matching import head_budgets
from kvjax.matching.quotas import quotas
from tests.compress import oracles

COUNT = 7


@functools.cache
def compiled():
    return jax.jit(quotas)


def found(shares, available, total) -> list[int]:
    """What each gets; fewer than ``COUNT`` are filled up with none."""
    more = COUNT - len(shares)
    shares = jnp.asarray([*shares, *[0] * more], jnp.float32)
    available = jnp.asarray([*available, *[0] * more], jnp.int32)
    got = compiled()(shares, available, jnp.int32(total))
    assert got.dtype == jnp.int32
    assert not np.asarray(got)[COUNT - more :].any()
    return np.asarray(got)[: COUNT - more].tolist()


NUMBER = np.array([100, 200, 700])
TOTAL_MASS = np.array([0.5, 0.3, 0.2])


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        (np.sqrt(TOTAL_MASS * NUMBER), [13, 15, 22]),
        (np.sqrt(TOTAL_MASS) * NUMBER, [7, 11, 32]),
        (NUMBER, [5, 10, 35]),
    ],
)
def test_the_three_rules_on_one_example(shares, expected):
    assert found(shares, NUMBER, 50) == expected


@pytest.mark.parametrize(
    ("shares", "available", "total", "expected"),
    [
        ([1, 1, 1], [9, 9, 9], 5, [2, 2, 1]),  # of equal remainders the first
        ([1, 1, 98], [9, 9, 99], 20, [1, 1, 18]),  # at least one each
        ([5, 4, 3, 2], [9, 9, 9, 9], 2, [1, 1, 0, 0]),  # as far as the total goes
        ([2, 3, 2], [9, 9, 9], 2, [1, 1, 0]),
        ([98, 1, 1], [4, 9, 9], 10, [4, 3, 3]),  # no more than there are
        ([98, 1, 0], [4, 9, 9], 20, [4, 9, 7]),  # and what is left finds takers
        ([1, 1], [3, 0], 5, [3, 0]),
        ([0, 0], [3, 3], 3, [2, 1]),
        ([1, 2, 3], [3, 4, 5], 99, [3, 4, 5]),
        ([1, 2, 3], [3, 4, 5], 0, [0, 0, 0]),
        ([1, 2, 3], [3, 4, 5], -2, [0, 0, 0]),
        ([], [], 3, []),
    ],
)
def test_by_hand(shares, available, total, expected):
    assert found(shares, available, total) == expected


@settings(max_examples=200, deadline=None)
@given(
    shares=st.lists(st.integers(0, 1000), min_size=COUNT, max_size=COUNT),
    available=st.lists(st.sampled_from([0, 1, 2, 5, 40, 4000]), min_size=COUNT, max_size=COUNT),
    total=st.integers(0, 9000),
)
def test_limits_hold_and_shares_are_met(shares, available, total):
    got = found(shares, available, total)
    total = min(total, sum(available))
    assert sum(got) == total
    assert all(0 <= one <= most for one, most in zip(got, available, strict=True))
    if total >= sum(most > 0 for most in available):
        assert all(one >= 1 for one, most in zip(got, available, strict=True) if most)
    plain = oracles.quotas(shares, available, total)
    # Where two remainders are equal but for rounding either may get the one token.
    assert max(abs(a - b) for a, b in zip(got, plain, strict=True)) <= 1


def test_budgets_of_heads_follow_a_table():
    rng = np.random.default_rng(0)
    shares = rng.lognormal(sigma=1.5, size=(36, 8))
    got = np.asarray(head_budgets(shares, each=800, most=6000))
    assert got.shape == shares.shape and got.dtype == np.int32
    assert got.sum() == 800 * 288 and got.max() == 6000 and got.min() >= 1
    inside = got < 6000
    large = inside & (got > 200)
    ratio = got[large] / shares[large]
    np.testing.assert_allclose(ratio, ratio.mean(), rtol=0.01)
    assert (np.asarray(head_budgets(np.ones((2, 3)), each=5, most=5)) == 5).all()


@pytest.mark.parametrize(
    ("shares", "each", "message"),
    [
        ([[1.0, -1.0]], 4, "shares must be numbers of at least 0"),
        ([[1.0, np.nan]], 4, "shares must be numbers of at least 0"),
        ([[0.0, 0.0]], 4, "not all of them 0"),
        ([[1.0, 1.0]], 0, "each must be between 1 and 9, got 0"),
        ([[1.0, 1.0]], 10, "each must be between 1 and 9, got 10"),
    ],
)
def test_tables_that_cannot_be_used_are_refused(shares, each, message):
    with pytest.raises(UsageError, match=message):
        head_budgets(np.array(shares), each, most=9)
