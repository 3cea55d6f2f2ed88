"""Attention of the last queries over the slots of a layer, for selectors that look at it.

Query heads are kept apart, in their groups: a KV head is never repeated.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.compress.context import Context, recency
from kvjax.errors import UsageError
from pallas_kernels.einsum import einsum_float32

NEG_INF = -1e30  # finite, so that a query with nothing to see gives zeros and never NaN


def latest_queries(ctx: Context, count: int) -> Bool[Array, "B N"]:
    """True at the queries of a row's ``count`` latest positions, as far as there are any."""
    newest = ctx.query_pos.max(1, keepdims=True)
    return (ctx.query_pos >= 0) & (ctx.query_pos > newest - count)


def query_logits(
    ctx: Context, count: int
) -> tuple[Float[Array, "B Hkv G N S"], Bool[Array, "B Hkv N S"]]:
    """Logits ``q . k * scale + bias`` of the ``count`` latest queries.

    Returns:
        The float32 logits, ``NEG_INF`` where not seen, and what a query sees: the tokens up to its
        own position. Queries before the latest see nothing.
    """
    rows, count_held, heads, dim = ctx.queries.shape
    kv_heads = ctx.k.shape[1]
    grouped = ctx.queries.reshape(rows, count_held, kv_heads, heads // kv_heads, dim)
    grouped, keys = grouped.astype(jnp.float32), ctx.k.astype(jnp.float32)
    dots = einsum_float32("bnhgd,bhsd->bhgns", grouped, keys)
    causal = ctx.pos[:, :, None] <= ctx.query_pos[:, None, :, None]
    seen = causal & ctx.live[:, :, None] & latest_queries(ctx, count)[:, None, :, None]
    logits = dots * jnp.float32(ctx.scale) + ctx.bias[:, :, None, None]
    return jnp.where(seen[:, :, None], logits, NEG_INF), seen


def softmax(logits: Float[Array, "*n S"], seen: Bool[Array, "*n S"]) -> Float[Array, "*n S"]:
    """Softmax over the slots that are seen; zero elsewhere, and everywhere if none is."""
    logits = jnp.where(seen, logits, NEG_INF)
    weights = jnp.where(seen, jnp.exp(logits - logits.max(-1, keepdims=True)), 0)
    return weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)


def group_attention(ctx: Context, count: int) -> Float[Array, "B Hkv N S"]:
    """Attention probabilities of the ``count`` latest queries, mean over the heads of a group.

    Zero for all other queries.
    """
    logits, seen = query_logits(ctx, count)
    return softmax(logits, jnp.broadcast_to(seen[:, :, None], logits.shape)).mean(2)


def or_recency(ctx: Context, scores: Float[Array, "B Hkv S"]) -> Float[Array, "B Hkv S"]:
    """The scores, but recency in rows whose cache has not met a query yet."""
    observed = (ctx.query_pos >= 0).any(1)[:, None, None]
    return jnp.where(observed, scores, recency(ctx))


def check_window(window: int) -> None:
    """Refuse a window without queries.

    Raises:
        UsageError: it is below 1.
    """
    if window < 1:
        raise UsageError(f"window must hold at least 1 query, got {window}")
