"""Segments of a text: what lies between double newlines, on a ledger of its tokens.

What matters of a token is kept as a byte of flags, found once for a vocabulary. A text is never
decoded and tokenised again.
"""

from collections.abc import Iterable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

BREAK, STARTS, ENDS, EMPTY = 1, 2, 4, 8
"""A token's text: holds a double newline; starts with a newline; ends with one; is empty."""


def newline_flags(texts: Iterable[str]) -> np.ndarray:
    """The uint8 flags of tokens, given what each decodes to, in order of their ids."""
    return np.array(
        [
            BREAK * ("\n\n" in text)
            | STARTS * text.startswith("\n")
            | ENDS * text.endswith("\n")
            | EMPTY * (not text)
            for text in texts
        ],
        np.uint8,
    )


def breaks(flags: UInt8[Array, "B L"]) -> Bool[Array, "B L"]:
    """True at every token that completes a double newline, alone or with those before it."""
    position = jnp.arange(flags.shape[1], dtype=jnp.int32)[None]
    spelled = jax.lax.cummax(jnp.where((flags & EMPTY) > 0, -1, position), axis=1)
    before = jnp.pad(spelled, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    ended = jnp.take_along_axis(flags & ENDS, jnp.maximum(before, 0), 1) > 0
    return ((flags & BREAK) > 0) | (((flags & STARTS) > 0) & ended & (before >= 0))


def segments(
    flags: UInt8[Array, "B L"],
    length: Int[Array, " B"],
    least: int = 32,
    merge: Literal["previous", "next"] = "previous",
) -> Int[Array, "B L"]:
    """The segment of every token of a text, from 0. A break ends a segment with its token.

    Args:
        flags: of the tokens by logical position, from ``newline_flags``.
        length: tokens of a row; what lies beyond is not read.
        least: tokens of a segment. A shorter one is merged, so that all have as many at least,
            but for a row that is shorter itself.
        merge: into the "previous" segment (the first one into the next), or into the "next" (the
            last one into the previous).

    Returns:
        int32 numbers, growing with the position; -1 beyond the end.
    """
    return number(breaks(flags), length, least, merge)


def attention_segments(
    attention: Float[Array, "B L"],
    length: Int[Array, " B"],
    least: int = 32,
    merge: Literal["previous", "next"] = "previous",
    factor: float = 2.0,
) -> Int[Array, "B L"]:
    """Segments that end where the mean attention to adjacent tokens differs the most.

    A segment ends before a token whose attention differs from that of the one before it by more
    than ``factor`` times the median of all such differences.

    Args:
        attention: mean attention to every position.
        length, least, merge: as for ``segments``.
        factor: multiple of the median.
    """
    step = jnp.abs(jnp.diff(attention, axis=1))
    inside = jnp.arange(1, attention.shape[1], dtype=jnp.int32)[None] < length[:, None]
    median = jnp.nanmedian(jnp.where(inside, step, jnp.nan), axis=1, keepdims=True)
    ends = jnp.pad(inside & (step > factor * median), ((0, 0), (0, 1)))
    return number(ends, length, least, merge)


def number(
    ends: Bool[Array, "B L"],
    length: Int[Array, " B"],
    least: int,
    merge: Literal["previous", "next"],
) -> Int[Array, "B L"]:
    """Number segments that end with given tokens, merging the short ones; see ``segments``."""
    merged = {"previous": _into_previous, "next": _into_next}[merge]
    return jax.vmap(lambda ends, length: merged(ends, length, least))(ends, length)


def _into_previous(ends, length, least):
    position = jnp.arange(len(ends), dtype=jnp.int32)
    starts = jnp.pad(ends, (1, 0), constant_values=True)[:-1]
    last = jnp.minimum(_next(ends), length - 1)
    # The first segment takes in others until it is long enough; after it long ones stand alone.
    first = _next(ends)[jnp.minimum(least, len(ends)) - 1] if least <= len(ends) else len(ends)
    own = starts & (last - position >= least - 1) & (position > first)
    return jnp.where(position < length, jnp.cumsum(own, dtype=jnp.int32), -1)


def _into_next(ends, length, least):
    position = jnp.arange(len(ends), dtype=jnp.int32)
    following = _next(ends)

    def cut(_, carry):
        start, own = carry
        end = following[jnp.minimum(start + least - 1, len(ends) - 1)]
        enough = (start + least <= len(ends)) & (length - 1 - end >= least)
        start = jnp.where(enough, end + 1, start)
        return start, own | ((position == start) & enough)

    nothing = jnp.zeros_like(ends)
    _, own = jax.lax.fori_loop(0, len(ends) // least, cut, (jnp.int32(0), nothing))
    return jnp.where(position < length, jnp.cumsum(own, dtype=jnp.int32), -1)


def _next(ends):
    """The first position from each one on where a segment ends; the number of tokens if none."""
    position = jnp.arange(len(ends), dtype=jnp.int32)
    return jax.lax.cummin(jnp.where(ends, position, len(ends)), reverse=True)
