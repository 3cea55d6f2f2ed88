"""Which slots stay, against a plain sort."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvjax.compress import keep_mask, protected
from kvjax.compress.context import Context
from tests.compress import layer

SHAPE = ROWS, HEADS, SLOTS = 2, 3, 9
SCORES = (float("nan"), float("-inf"), -1.5, -0.0, 0.0, 1e-30, 2.5, float("inf"))


def oracle(scores, live, pos, must, budget) -> list[set[int]]:
    """For every row and head the slots that stay."""
    kept = []
    for row, head in np.ndindex(scores.shape[:2]):
        at = row, head
        there = [s for s in range(scores.shape[2]) if live[at][s]]
        forced = {s for s in there if must[at][s]}

        def worth(s, at=at):
            score = float(scores[at][s])
            number = score == score
            return (number, score if number else 0.0, int(pos[at][s]))

        rest = sorted((s for s in there if s not in forced), key=worth, reverse=True)
        kept.append(forced | set(rest[: max(0, int(budget[row]) - len(forced))]))
    return kept


def as_sets(mask) -> list[set[int]]:
    assert mask.dtype == jnp.bool_
    return [set(np.flatnonzero(line).tolist()) for line in np.asarray(mask).reshape(-1, SLOTS)]


def bools():
    return hnp.arrays(np.bool_, SHAPE)


@functools.cache
def compiled():
    return jax.jit(keep_mask)


@settings(max_examples=150, deadline=None)
@given(
    scores=hnp.arrays(np.float32, SHAPE, elements=st.sampled_from(SCORES).map(np.float32)),
    live=bools(),
    must=bools() | st.just(np.zeros(SHAPE, bool)),
    order=st.permutations(range(SLOTS)),
    garbage=st.integers(-(2**31), 2**31 - 1),
    budget=hnp.arrays(np.int32, ROWS, elements=st.integers(0, SLOTS + 3)),
)
def test_keep_mask_is_a_sort(scores, live, must, order, garbage, budget):
    pos = np.stack([np.roll(order, i) * 7 for i in range(ROWS * HEADS)]).reshape(SHAPE)
    pos = np.where(live, pos, garbage).astype(np.int32)
    expected = oracle(scores, live, pos, must, budget)
    arrays = [jnp.asarray(x) for x in (scores, live, pos, must)]
    assert as_sets(compiled()(*arrays, jnp.asarray(budget))) == expected
    for row in range(ROWS):
        one = as_sets(compiled()(*arrays, jnp.asarray(budget[row])))
        assert one[row * HEADS : (row + 1) * HEADS] == expected[row * HEADS : (row + 1) * HEADS]


def one_head(scores, pos, live=None, must=None):
    live = [True] * len(scores) if live is None else live
    must = [False] * len(scores) if must is None else must
    kinds = (jnp.float32, jnp.bool_, jnp.int32, jnp.bool_)
    return [
        jnp.asarray(x, kind)[None, None]
        for x, kind in zip((scores, live, pos, must), kinds, strict=True)
    ]


@pytest.mark.parametrize(
    ("arrays", "budget", "stay"),
    [
        (one_head([1, 3, 2], [0, 1, 2]), 2, {1, 2}),
        (one_head([1, 1, 1], [5, 9, 7]), 2, {1, 2}),
        (one_head([-0.0, 0.0, -0.0], [5, 9, 11]), 2, {1, 2}),
        (one_head([0.0, -0.0, 0.0], [5, 9, 7]), 1, {1}),
        (one_head([np.nan, -np.inf, np.nan], [5, 1, 7]), 2, {1, 2}),
        (one_head([-np.nan, 4, np.nan], [9, 1, 7]), 1, {1}),
        (one_head([9, 1, 2], [0, 1, 2], must=[False, True, True]), 1, {1, 2}),
        (one_head([9, 1, 2], [0, 1, 2], must=[False, True, False]), 2, {0, 1}),
        (one_head([9, np.nan, 2], [0, 1, 2], must=[False, True, False]), 1, {1}),
        (one_head([9, 1, 2], [0, 1, 2], live=[False, True, True]), 1, {2}),
        (one_head([9, 1, 2], [0, 1, 2], [False, True, True], [True, False, False]), 2, {1, 2}),
        (one_head([9, 1, 2], [0, 1, 2]), 0, set()),
        (one_head([9, 1, 2], [0, 1, 2]), 10, {0, 1, 2}),
        (one_head([3.0000002, 3.0], [0, 1]), 1, {0}),
    ],
)
def test_keep_mask_by_hand(arrays, budget, stay):
    assert set(np.flatnonzero(keep_mask(*arrays, budget)[0, 0]).tolist()) == stay


def test_protected():
    ctx: Context = layer.build(1, seed=2)
    for sinks, recent, prompt in [(0, 0, False), (4, 0, False), (0, 6, False), (3, 8, True)]:
        mask = protected(ctx, sinks=sinks, recent=recent, prompt=prompt)
        assert mask.dtype == jnp.bool_
        for row, head in np.ndindex(mask.shape[:2]):
            length = layer.LENGTHS[row]
            expected = {
                token.slot
                for token in layer.tokens_of(ctx, row, head)
                if token.pos < sinks
                or token.pos >= length - recent
                or (prompt and token.pos < length // 3)
            }
            assert set(np.flatnonzero(mask[row, head]).tolist()) == expected
