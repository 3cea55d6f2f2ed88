"""What a selector is told about the cache of one layer."""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """The cache of one layer, all rows. Slots are in any order and may be ragged.

    Attributes:
        bias: float32 log-mass added to a slot's attention logit. ``-inf``: there is no token, and
            whatever else is said of the slot may be NaN or garbage.
        pos: logical position of a slot's token; heads may hold different ones.
        length: tokens that a row has read: its positions are 0 to ``length - 1``.
        prompt: tokens of a row's prompt, the first ones.
        seed: seed of selectors that draw.
        k: keys with their rotary position, for selectors with ``needs_keys`` or ``needs_queries``.
        queries: the last queries with their rotary position, in any order; query head ``h`` reads
            KV head ``h // (Hq // Hkv)``.
        query_pos: logical position of each query; -1: there is none, and it may be NaN.
        mass: attention probability that a slot has received so far, summed over queries and over
            the query heads of the group, for selectors with ``needs_mass``.
        v: values, for attention matching.
        segment: number of the segment that a slot's token is in, growing with its position, for
            selectors with ``needs_segments``.
        must: what stays whatever its score, for selectors that share out a budget; None: nothing.
        room: tokens that a KV head may hold after the selection, those of ``must`` included, for a
            whole row or for each of its heads.
        layer: index of the layer.
        scale: factor of the attention logits.
    """

    bias: Float[Array, "B Hkv S"]
    pos: Int[Array, "B Hkv S"]
    length: Int[Array, " B"]
    prompt: Int[Array, " B"]
    seed: Int[Array, ""]
    k: Float[Array, "B Hkv S D"] | None = None
    queries: Float[Array, "B N Hq D"] | None = None
    query_pos: Int[Array, "B N"] | None = None
    mass: Float[Array, "B Hkv S"] | None = None
    v: Float[Array, "B Hkv S D"] | None = None
    segment: Int[Array, "B Hkv S"] | None = None
    must: Bool[Array, "B Hkv S"] | None = None
    room: Int[Array, " B"] | Int[Array, "B Hkv"] | None = None
    layer: Int[Array, ""] | int = 0
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})

    @property
    def live(self) -> Bool[Array, "B Hkv S"]:
        """True where a slot holds a token."""
        return self.bias > -jnp.inf


class Selector(Protocol):
    """Scores the tokens of one layer; those with the highest scores stay.

    A selector is a frozen dataclass of its parameters. It reads the slots of a KV head without
    regard to their order, and no row but its own.

    Attributes:
        needs_queries: how many of the last queries it reads.
        needs_mass: whether it reads ``Context.mass``.
        needs_keys: whether it reads ``Context.k`` for more than the logits of queries.

    One that reads ``Context.segment`` has a ``needs_segments`` as well, and one that tells which
    tokens must stay as they are when others are matched has a ``choose`` (see ``SegmentQuotas``).
    """

    @property
    def needs_queries(self) -> int: ...

    @property
    def needs_mass(self) -> bool: ...

    @property
    def needs_keys(self) -> bool: ...

    def __call__(self, ctx: Context) -> Float[Array, "B Hkv S"]:
        """Float32 scores. A slot without a token may get any score, also NaN."""
        ...


def recency(ctx: Context) -> Float[Array, "B Hkv S"]:
    """Score of a token that is the higher the later it was read: its position."""
    return ctx.pos.astype(jnp.float32)


def in_window(ctx: Context, window: int) -> Bool[Array, "B Hkv S"]:
    """True where a slot's token is among the last ``window`` that its row has read."""
    return ctx.pos >= (ctx.length - window)[:, None, None]
