"""Reading a prompt: a chunk of tokens attends to the pages before it and to itself."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import KVCache, LayerCache, append, reserve
from kvjax.models.attention import (
    NEG_INF,
    add_sinks,
    biased_attention,
    causal_mask,
    masked_attention,
    merge,
)
from kvjax.models.decoder import Decoder

QUERY_BLOCK = 512
"""Queries attended at once inside a chunk: bounds the memory of the scores."""
HISTORY_BLOCK = 512
"""Slots of the history attended at once."""


@functools.partial(jax.jit, donate_argnames=("cache", "logits"))
def prefill_chunk(
    model: Decoder,
    cache: KVCache,
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
) -> tuple[KVCache, Float[Array, "B V"]]:
    """Read the next ``count`` tokens of every row; the rest of ``tokens`` is padding.

    Call it again for a longer prompt: a chunk attends to all that its row has read before.

    Args:
        model: the decoder.
        cache: what the rows hold so far; donated.
        logits: logits after each row's last token so far (anything at the start); donated.
        tokens: right-padded token ids.
        count: how many of them belong to each row; 0 leaves a row as it is.

    Returns:
        The cache with the tokens in it, and the float32 logits after each row's last token.
    """
    length = cache.length
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = length[:, None] + offset
    keep = offset < count[:, None]
    cache = reserve(cache, length + count)

    def attend(index, layer, q, k, v, sinks):
        spec = model.config.scale, model.config.windows[index]
        out, lse = _attend_history(q, positions, layer, length, *spec)
        local = _attend_local(q, k, v, positions, *spec)
        out, lse = merge(out, lse, *local)
        return add_sinks(out, lse, sinks).astype(q.dtype), append(layer, k, v, positions, keep)

    hidden, layers = model(tokens, positions, attend, cache.layers)
    last = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], 1)[:, 0]
    logits = jnp.where((count > 0)[:, None], model.logits(last), logits)
    return dataclasses.replace(cache, layers=layers, length=length + count), logits


def _attend_local(q, k, v, positions, scale, window):
    """Causal attention inside the chunk, a block of queries at a time.

    Padding lies to the right, in the future of every token, so it needs no mask of its own.
    """
    parts = []
    for start in range(0, q.shape[1], QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, q.shape[1])
        mask = causal_mask(positions[:, start:end], positions[:, :end], window)
        parts.append(masked_attention(q[:, start:end], k[:, :end], v[:, :end], mask, scale))
    out, lse = zip(*parts, strict=True)
    return jnp.concatenate(out, 1), jnp.concatenate(lse, 1)


def _attend_history(q, positions, layer: LayerCache, length, scale, window):
    """Attention to the pages, block after block; as many as the longest row has filled."""
    (pool,), (table,) = layer.pools, layer.tables
    rows, kv_heads, width = table.shape
    step = max(1, HISTORY_BLOCK // pool.page_size)
    table = jnp.pad(table, ((0, 0), (0, 0), (0, -width % step)))  # with the scratch page

    def block(i, carry):
        pages = jax.lax.dynamic_slice_in_dim(table, i * step, step, 2)
        k = pool.k[pages].reshape(rows, kv_heads, -1, q.shape[-1])
        v = pool.v[pages].swapaxes(-1, -2).reshape(k.shape)
        bias = pool.bias[pages].reshape(rows, kv_heads, -1)
        pos = pool.pos[pages].reshape(rows, kv_heads, -1)
        bias = bias[:, :, None]
        if window is not None:
            near = positions[:, None, :, None] - pos[:, :, None] < window
            bias = jnp.where(near, bias, -jnp.inf)
        return merge(*carry, *biased_attention(q, k, v, bias, scale))

    empty = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], NEG_INF, jnp.float32)
    filled = -(-length.max() // (step * pool.page_size))
    return jax.lax.fori_loop(0, filled, block, empty)
