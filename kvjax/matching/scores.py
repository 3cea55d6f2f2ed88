"""What the last queries see of one KV head.

The queries of all heads of a group are the rows of one matrix, head-major: row ``g * N + r``.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.compress.attention import NEG_INF, latest_queries, softmax
from kvjax.compress.context import Context
from pallas_kernels.einsum import einsum_float32

LOGITS = 128 * 2**20
"""Bytes of the logits that are in memory at a time, if those of one row are no more."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Head:
    """One KV head of one row. Slots without a token hold zeros, but for their bias of ``-inf``.

    Attributes:
        queries: float32 queries of the whole group, zeros where there is none.
        query_pos: their logical positions, -1 where there is none.
        k: float32 keys.
        pos: logical positions of the slots.
        bias: float32 log-mass.
        scale: factor of the attention logits.
    """

    queries: Float[Array, "n D"]
    query_pos: Int[Array, " n"]
    k: Float[Array, "S D"]
    pos: Int[Array, " S"]
    bias: Float[Array, " S"]
    scale: float = dataclasses.field(metadata={"static": True})

    @property
    def live(self) -> Bool[Array, " S"]:
        """True where a slot holds a token."""
        return self.bias > -jnp.inf

    @property
    def seen(self) -> Bool[Array, "n S"]:
        """What a query sees: the tokens up to its own position; nothing if there is no query."""
        return self.live[None] & (self.pos[None] <= self.query_pos[:, None])

    def logits(
        self, k: Float[Array, "t D"], bias: Float[Array, " t"], seen: Bool[Array, "n t"]
    ) -> Float[Array, "n t"]:
        """Float32 ``q . k * scale + bias``, ``NEG_INF`` where not seen."""
        dots = einsum_float32("nd,td->nt", self.queries, k)
        return jnp.where(seen, dots * jnp.float32(self.scale) + bias[None], NEG_INF)


def each_head(function: Callable, ctx: Context, queries: int, *arrays: Array | None):
    """Map ``function(head, *arrays of the head)`` over the KV heads of every row.

    Heads go side by side, and so do as many rows as have logits of ``LOGITS`` bytes at most: the
    rest comes after them.

    Args:
        function: of a ``Head`` and of what ``arrays`` hold for it; returns a pytree of arrays.
        ctx: the cache of one layer, with keys and queries.
        queries: how many of a row's latest queries take part.
        arrays: with leading axes of rows and KV heads; None is passed on.
    """
    rows, count, heads, dim = ctx.queries.shape
    kv_heads = ctx.bias.shape[1]
    asked = latest_queries(ctx, queries)
    pooled = jnp.where(asked[:, :, None, None], ctx.queries, 0).astype(jnp.float32)
    pooled = pooled.reshape(rows, count, kv_heads, heads // kv_heads, dim)
    pooled = pooled.transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, dim)
    query_pos = jnp.where(asked, ctx.query_pos, -1)
    query_pos = jnp.tile(query_pos[:, None], (1, kv_heads, heads // kv_heads))

    def of_head(queries, query_pos, k, pos, bias, arrays):
        live = bias > -jnp.inf
        k = jnp.where(live[:, None], k, 0).astype(jnp.float32)
        head = Head(queries, query_pos, k, jnp.where(live, pos, 0), bias, ctx.scale)
        return function(head, *arrays)

    fit = max(LOGITS // (4 * kv_heads * pooled.shape[2] * ctx.bias.shape[2]), 1)
    together = max(n for n in range(1, rows + 1) if n <= fit and rows % n == 0)
    return jax.lax.map(
        lambda row: jax.vmap(of_head)(*row),
        (pooled, query_pos, ctx.k, ctx.pos, ctx.bias, arrays),
        batch_size=together,
    )


def attention_scores(
    head: Head, among: Bool[Array, " S"], reduce: Literal["rms", "mean", "max"]
) -> Float[Array, " S"]:
    """Attention that a slot gets from the queries, each summing to 1 over some of the slots.

    Args:
        head: the KV head.
        among: the slots over which attention is normalised; the others get 0.
        reduce: over the queries that see any of them: root of the mean square, mean or maximum.
    """
    seen = head.seen & among[None]
    attention = softmax(head.logits(head.k, head.bias, seen), seen)
    if reduce == "max":
        return attention.max(0)
    count = jnp.maximum(seen.any(1).sum(dtype=jnp.int32), 1).astype(jnp.float32)
    if reduce == "mean":
        return attention.sum(0) / count
    return jnp.sqrt((attention**2).sum(0) / count)


def must_stay(ctx: Context) -> Bool[Array, "B Hkv S"]:
    """``Context.must``, or nothing where it is not given."""
    return jnp.zeros_like(ctx.live) if ctx.must is None else ctx.must & ctx.live


def budgets(ctx: Context) -> Int[Array, "B Hkv"]:
    """Tokens of every KV head that may stay beside those of ``Context.must``."""
    room = jnp.broadcast_to(ctx.room.reshape(len(ctx.room), -1), ctx.bias.shape[:2])
    return jnp.maximum(room - must_stay(ctx).sum(2, dtype=jnp.int32), 0)
