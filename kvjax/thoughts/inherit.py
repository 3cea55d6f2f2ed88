"""What survives of a segment takes over from what is evicted of it."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.cache.cache import LayerCache, query_positions
from kvjax.compress.context import Context
from kvjax.compress.refit import match, read_classes, store_change
from kvjax.matching import AttentionMatching
from pallas_kernels.read import plain_keys, plain_values


def inherit(
    layer: LayerCache,
    kept: list[Bool[Array, "B Hkv _ page"]],
    segment: list[Int[Array, "B Hkv _ page"]],
    count: int,
    compactor: AttentionMatching,
    scale: float,
    length: Int[Array, " B"],
) -> LayerCache:
    """Let the survivors of a segment take over from those of it that are about to be evicted.

    Tokens of other segments stay as they are, and so do the prompt and the recent window.

    Args:
        kept: of every class, the slots that stay.
        segment: of every slot; what is in none has a number below zero.
        count: segments that there can be.
        scale: factor of the attention logits.
        length: tokens read.
    """
    order = [*range(1, len(layer.pools)), 0]  # as ``store_change`` counts slots
    rows, heads = layer.tables[0].shape[:2]

    def joined(parts):
        return jnp.concatenate([parts[c].reshape(rows, heads, -1) for c in order], -1)

    def of_pools(name):
        pools = zip(layer.pools, layer.tables, strict=True)
        return joined([getattr(pool, name)[table] for pool, table in pools])

    fits = compactor.needs_values
    values = read_classes(plain_values, layer, jnp.float32, order) if fits else []
    ctx = Context(
        bias=of_pools("bias"),
        pos=of_pools("pos"),
        length=length,
        prompt=length,
        seed=jnp.int32(0),
        k=jnp.concatenate(read_classes(plain_keys, layer, jnp.float32, order), 2),
        v=jnp.concatenate(values, 2) if values else None,
        queries=layer.queries,
        query_pos=query_positions(layer, length),
        scale=scale,
    )
    stay = joined(kept) & ctx.live
    # A segment of the prompt or of none has no number: it is the last one, which loses nothing.
    number = joined(segment)
    number = jnp.where(ctx.live & (number >= 0), jnp.minimum(number, count), count)
    goes = ctx.live & ~stay & (number < count)
    row, head = jnp.arange(rows)[:, None, None], jnp.arange(heads)[None, :, None]
    lost = jnp.zeros((rows, heads, count + 1), bool).at[row, head, number].max(goes)
    loses = jnp.take_along_axis(lost, number, 2)
    change = match(compactor, ctx, stay, ~loses, stay.shape[2], ctx.k)
    return store_change(layer, change)
