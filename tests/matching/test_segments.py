"""Segments against a scan of the text itself."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.matching.segments import attention_segments, breaks, newline_flags, segments

TEXTS = ("a", "b c", "\n", "\n\n", "\n\n\n", ".\n\n", ".\n", "\nx", "\n\nx", "y\n\nx", "\nz\n", "")
TABLE = newline_flags(TEXTS)
WIDTH = 40


def ends_of(ids) -> list[int]:
    """Tokens that complete a double newline, by the characters of the decoded text."""
    text = "".join(TEXTS[i] for i in ids)
    owner = [token for token, i in enumerate(ids) for _ in TEXTS[i]]
    return sorted({owner[c] for c in range(1, len(text)) if text[c - 1 : c + 1] == "\n\n"})


def merged(ends, length, least, merge) -> list[int]:
    """Lengths of the segments, once short ones have been merged."""
    cuts = [0, *[end + 1 for end in ends if end + 1 < length], length]
    pieces = [b - a for a, b in itertools.pairwise(cuts) if b > a]
    out = []
    if merge == "previous":
        for piece in pieces:
            if out and (piece < least or out[0] < least):
                out[-1] += piece
            else:
                out.append(piece)
        return out
    pending = 0
    for piece in pieces:
        pending += piece
        if pending >= least:
            out.append(pending)
            pending = 0
    if pending and out:
        out[-1] += pending
    elif pending:
        out = [pending]
    return out


@functools.cache
def compiled(least, merge):
    return jax.jit(lambda flags, length: segments(flags, length, least, merge))


def found(ids_of_rows, least, merge) -> list[list[int]]:
    flags = np.full((len(ids_of_rows), WIDTH), 255, np.uint8)
    for row, ids in enumerate(ids_of_rows):
        flags[row, : len(ids)] = TABLE[np.array(ids, int)]
    length = jnp.asarray([len(ids) for ids in ids_of_rows], jnp.int32)
    got = np.asarray(compiled(least, merge)(jnp.asarray(flags), length))
    assert got.dtype == np.int32
    for row, ids in zip(got, ids_of_rows, strict=True):
        assert (row[len(ids) :] == -1).all()
    return [row[: len(ids)].tolist() for row, ids in zip(got, ids_of_rows, strict=True)]


def numbered(lengths) -> list[int]:
    return [number for number, length in enumerate(lengths) for _ in range(length)]


TOKEN = st.integers(0, len(TEXTS) - 1)
PROSE = st.sampled_from([0, 1])
ROW = st.lists(TOKEN | PROSE | PROSE, max_size=WIDTH)


@pytest.mark.parametrize("least", [1, 4, 11])
@pytest.mark.parametrize("merge", ["previous", "next"])
@settings(max_examples=40, deadline=None)
@given(rows=st.tuples(ROW, ROW))
def test_segments_are_those_of_the_text(least, merge, rows):
    got = found(rows, least, merge)
    for ids, row in zip(rows, got, strict=True):
        assert row == numbered(merged(ends_of(ids), len(ids), least, merge))
        sizes = np.bincount(row) if row else np.array([], int)
        assert sizes.sum() == len(ids)
        assert (sizes >= min(least, len(ids))).all()


def ids(*texts) -> list[int]:
    return [TEXTS.index(text) for text in texts]


@pytest.mark.parametrize(
    ("tokens", "lengths"),
    [
        (ids("a", ".\n\n", "a", "a"), [2, 2]),  # at the end of a token
        (ids("a", "y\n\nx", "a"), [2, 1]),  # inside one
        (ids("a", "\n", "\n", "a"), [3, 1]),  # across two
        (ids("a", ".\n", "\nx", "a"), [3, 1]),
        (ids("a", ".\n", "", "\nx", "a"), [4, 1]),  # and over one that shows nothing
        (ids("a", "\n\n\n", "a"), [2, 1]),
        (ids("a", "\n\n", "\n", "a"), [2, 1, 1]),  # the third newline completes another
        (ids("\n\n", "a", "a"), [1, 2]),  # at the start
        (ids("a", "b c", "a", "\n"), [4]),  # none
        (ids("a", "\nz\n", "a"), [3]),  # two newlines, not one after the other
        (ids("a", "a", "\n\n"), [3]),  # nothing follows
        ([], []),
    ],
)
def test_breaks_by_hand(tokens, lengths):
    for merge in ("previous", "next"):
        assert found([tokens, tokens], 1, merge) == [numbered(lengths)] * 2


@pytest.mark.parametrize(
    ("lengths", "previous", "next_"),
    [
        ([5, 2, 6], [7, 6], [5, 8]),
        ([2, 5, 6], [7, 6], [7, 6]),
        ([1, 1, 1], [3], [3]),  # all of them short
        ([6, 5, 2], [6, 7], [6, 7]),  # the last one
        ([1, 2, 1, 4, 4, 1], [4, 4, 5], [4, 4, 5]),
        ([4, 1, 1, 1, 1, 4], [8, 4], [4, 4, 4]),
    ],
)
def test_short_segments_by_hand(lengths, previous, next_):
    tokens = [token for length in lengths for token in [0] * (length - 1) + ids("\n\n")]
    assert found([tokens, tokens], 4, "previous")[0] == numbered(previous)
    assert found([tokens, tokens], 4, "next")[0] == numbered(next_)


def test_a_ledger_that_is_shorter_than_a_segment():
    flags = jnp.asarray(TABLE[ids("a", "\n\n", "a")])[None]
    for merge in ("previous", "next"):
        got = compiled(32, merge)(flags, jnp.asarray([3], jnp.int32))
        np.testing.assert_array_equal(got, [[0, 0, 0]])


def test_flags():
    assert TABLE.dtype == np.uint8
    assert np.asarray(jax.jit(breaks)(jnp.asarray(TABLE)[None]))[0].tolist() == [
        *[False, False, False, True, True, True, False, True, True, True, False, False]
    ]


def test_a_jump_of_attention_ends_a_segment():
    """Steps of .1 but for two: the median is .1, and twice that is passed at 4 and at 10 alone."""
    steps = np.full(15, 0.1)
    steps[[3, 9]] = 0.3, 0.21
    attention = np.full((1, 20), np.nan)
    attention[0, :16] = np.cumsum([0, *(steps * (-1) ** np.arange(15))])
    length = jnp.asarray([16], jnp.int32)
    found = jax.jit(attention_segments, static_argnames=("least", "merge"))
    got = found(jnp.asarray(attention, jnp.float32), length, least=2)
    np.testing.assert_array_equal(got[0, :16], numbered([4, 6, 6]))
    assert (np.asarray(got[0, 16:]) == -1).all()
    got = found(jnp.asarray(attention, jnp.float32), length, least=5, merge="next")
    np.testing.assert_array_equal(got[0, :16], numbered([10, 6]))
