"""What kind of thought a segment is."""

import dataclasses
from typing import ClassVar, Literal, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.errors import UsageError
from kvjax.thoughts.state import KINDS

SEGMENT = 128
"""Tokens of a segment: ThinKV's refresh interval tau."""


class Segmenter(Protocol):
    """Finds the kind of a segment, a row at a time, from what the row's own tokens say.

    Attributes:
        every: tokens of a segment.
        layers: those whose attention sparsity it is told.
        covers: whether a kind that is found at a segment's border is the next segment's or the
            past one's. Tokens of a segment whose kind comes late wait for it in the recent window.
    """

    @property
    def every(self) -> int: ...

    @property
    def layers(self) -> tuple[int, ...]: ...

    @property
    def covers(self) -> Literal["next", "past"]: ...

    def __call__(self, sparsity: Float[Array, " B"], segment: Int[Array, " B"]) -> Int[Array, " B"]:
        """The kind of each row's segment.

        Args:
            sparsity: of the row's last token, mean of ``layers``; NaN without any.
            segment: the segment's number.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """By attention sparsity, as ThinKV does (arXiv 2510.01290, section 4.1 and Algorithm 1).

    Below the first threshold a segment is execution, above the second a transition, between them
    reasoning.

    Attributes:
        layers: the layers whose sparsity is averaged (L*).
        thresholds: the two of them, the lower one first.
        fingerprint: of the model that they belong to; empty if that is not to be checked.
        corrected: tokens that have been evicted count as ones that would have had too little
            attention, which is why they went. Thresholds come from uncompressed runs, and evicting
            what is hardly attended lowers the sparsity that is measured.
    """

    layers: tuple[int, ...]
    thresholds: tuple[float, float]
    every: int = SEGMENT
    covers: Literal["next", "past"] = "next"
    corrected: bool = True
    fingerprint: str = ""

    def __post_init__(self):
        low, high = self.thresholds
        if not 0 <= low <= high <= 1:
            raise UsageError(f"thresholds must rise within 0 and 1, got {self.thresholds}")
        if not self.layers or len(set(self.layers)) < len(self.layers) or min(self.layers) < 0:
            raise UsageError(f"layers must be different layers of the model, got {self.layers}")
        _check(self)

    def __call__(self, sparsity: Float[Array, " B"], segment: Int[Array, " B"]) -> Int[Array, " B"]:
        low, high = self.thresholds
        kind = jnp.where(sparsity < low, KINDS.index("E"), KINDS.index("R"))
        return jnp.where(sparsity > high, KINDS.index("T"), kind).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Given:
    """Kinds that somebody else has found, or a fixed pattern of them.

    Attributes:
        kinds: letters of ``KINDS``, one a segment, again from the start when they are used up: "R"
            is one kind of thought for everything, "RRRET" a pattern.
    """

    kinds: str = "R"
    every: int = SEGMENT
    covers: Literal["next", "past"] = "next"

    layers: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self):
        if not self.kinds or set(self.kinds) - set(KINDS):
            raise UsageError(f"kinds must be letters of {KINDS}, got {self.kinds!r}")
        _check(self)

    def __call__(self, sparsity: Float[Array, " B"], segment: Int[Array, " B"]) -> Int[Array, " B"]:
        kinds = jnp.asarray([KINDS.index(kind) for kind in self.kinds], jnp.int32)
        return kinds[segment % len(self.kinds)]


def _check(segmenter: Segmenter) -> None:
    if not isinstance(segmenter.every, int) or segmenter.every < 16:
        raise UsageError(f"a segment must have at least 16 tokens, got {segmenter.every!r}")
    if segmenter.covers not in ("next", "past"):
        raise UsageError(f"covers must be 'next' or 'past', got {segmenter.covers!r}")
