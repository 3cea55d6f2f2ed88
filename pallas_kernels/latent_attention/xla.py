"""``latent_attention`` in plain XLA, on any device: some pages of one block at a time.

Logits are sums over blocks, since rotating a key is linear, and so are the weighted sums of values.
A table of logits by position joins the blocks of a token, its keys and its values: they lie in
slots that know nothing of each other but the position. Of keys, no more than a few pages of one
block are rebuilt at once. Values are not rebuilt at all: their components are weighted and added,
and the sum is.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.einsum import einsum_float32
from pallas_kernels.latent_attention.layout import Basis, Rotary, blocks_of
from pallas_kernels.layout import SCRATCH_PAGE, KVPages
from pallas_kernels.read import coded_keys

NEG_INF = -1e30  # finite, so that a row with no live slot gives zeros and never NaN
SLOTS = 512
"""Slots of a block that are read at once."""


def latent_attention_xla(
    q: Float[Array, "B Hq D"],
    pools: tuple[KVPages, ...],
    tables: tuple[Int[Array, "B _ _"], ...],
    keys: Basis,
    values: Basis,
    rotary: Rotary,
    *,
    scale: float,
    span: int,
    q_pos: Int[Array, " B"] | None = None,
    window: int | None = None,
    sinks: Float[Array, " Hq"] | None = None,
) -> tuple[Float[Array, "B Hq D"], Float[Array, "B Hq"]]:
    """See ``pallas_kernels.latent_attention``."""
    given = {"scale": scale, "span": span, "q_pos": q_pos, "window": window, "sinks": sinks}
    arguments = q, pools, tables, keys, values, rotary
    return attend_by_position(*arguments, logits_of=latent_logits, sums_of=latent_sums, **given)


def attend_by_position(
    q: Float[Array, "B Hq D"],
    pools: tuple[KVPages, ...],
    tables: tuple[Int[Array, "B _ _"], ...],
    keys: Basis,
    values: Basis,
    rotary: Rotary,
    *,
    logits_of: Callable[..., tuple[Array, Array]],
    sums_of: Callable[..., Array],
    scale: float,
    span: int,
    q_pos: Int[Array, " B"] | None,
    window: int | None,
    sinks: Float[Array, " Hq"] | None,
) -> tuple[Float[Array, "B Hq D"], Float[Array, "B Hq"]]:
    """What both backends do around reading a pool.

    Args:
        logits_of: what `latent_logits` is here.
        sums_of: what `latent_sums` is here.
    """
    rows, _, dim = q.shape
    width, channels = keys.back.shape
    grouped = q.reshape(rows, channels // dim, -1, dim)
    logits, live = logits_of(grouped, pools, tables, keys, rotary, span)
    if window is not None:
        live &= q_pos[:, None] - jnp.arange(span, dtype=jnp.int32)[None] < window
    weights, lse = _softmax(logits * scale, live[:, None], sinks)

    # By KV heads first, as their products are made.
    sums = sums_of(weights.reshape(*grouped.shape[:3], span), pools, tables, width)
    back = values.back.astype(jnp.float32).reshape(width, -1, dim)
    out = einsum_float32("hbgd,dhe->hbge", sums, back).swapaxes(0, 1).reshape(q.shape)
    if values.mean is not None:
        mean = jnp.repeat(values.mean.reshape(-1, dim), grouped.shape[2], 0)
        out += weights.sum(-1, keepdims=True) * mean[None]
    return out, lse


def latent_logits(
    q: Float[Array, "B Hkv G D"],
    pools: tuple[KVPages, ...],
    tables: tuple[Int[Array, "B _ _"], ...],
    keys: Basis,
    rotary: Rotary,
    span: int,
) -> tuple[Float[Array, "B Hq L"], Bool[Array, "B L"]]:
    """``q . k`` by position, in float32, and where a token is; elsewhere it may be anything."""
    rows, kv_heads, group, _ = q.shape
    logits = jnp.zeros((rows, kv_heads * group, span), jnp.float32)
    live = jnp.zeros((rows, span), bool)
    for pool, table in zip(pools, tables, strict=True):
        logits = _add_logits(logits, q.astype(jnp.float32), pool, table, keys, rotary)
        live = _mark(live, pool.pos[table[:, 0]].reshape(rows, -1))
    return logits, live


def latent_sums(
    weights: Float[Array, "B Hkv G L"],
    pools: tuple[KVPages, ...],
    tables: tuple[Int[Array, "B _ _"], ...],
    width: int,
) -> Float[Array, "Hkv B G d"]:
    """Components of values, summed by weights by position, in float32."""
    rows, kv_heads, group, span = weights.shape
    weights = weights.reshape(rows, -1, span)
    sums = jnp.zeros((*weights.shape[:2], width), jnp.float32)
    for pool, table in zip(pools, tables, strict=True):
        sums += _weighted(weights, pool, table, width)
    return sums.reshape(rows, kv_heads, group, width).swapaxes(0, 1)


def _read(pool: KVPages, pages: Int[Array, "B P"]) -> tuple[Array, Array]:
    """Components [B, S, W] and positions [B, S] of some pages; zero where there is no token."""
    pos = pool.pos[pages].reshape(len(pages), -1)
    parts = coded_keys(pool, pages, jnp.float32).reshape(*pos.shape, -1)
    return jnp.where((pos >= 0)[..., None], parts, 0), pos


def _over_pages(table: Int[Array, "B N P"], page: int, visit, carry, *, side: int, count: int):
    """Call ``visit(block, pages, carry)`` for all pages of keys (0) or values (1), some at once."""
    step = max(1, min(SLOTS // page, table.shape[2]))
    padded = jnp.pad(table, ((0, 0), (0, 0), (0, -table.shape[2] % step)))  # with the scratch page
    owned = (table != SCRATCH_PAGE).sum(-1, dtype=jnp.int32).max(0)

    def of_block(block, carry):
        line = 2 * block + side
        mine = jax.lax.dynamic_index_in_dim(padded, line, 1, keepdims=False)

        def some(i, carry):
            return visit(block, jax.lax.dynamic_slice_in_dim(mine, i * step, step, 1), carry)

        return jax.lax.fori_loop(0, -(-owned[line] // step), some, carry)

    return jax.lax.fori_loop(0, count, of_block, carry)


def _add_logits(logits, q, pool, table, keys: Basis, rotary: Rotary):
    width, channels = keys.back.shape
    count = blocks_of(pool, table, width)
    back = keys.back.astype(jnp.float32).reshape(count, width // count, channels)

    def visit(block, pages, logits):
        x, pos = _read(pool, pages)
        k = einsum_float32("bsw,wd->bsd", x, jax.lax.dynamic_index_in_dim(back, block, 0, False))
        if keys.mean is not None:  # once a token: with its first block
            k += jnp.where(block == 0, keys.mean, 0)[None, None]
        angles = pos.astype(jnp.float32)[..., None] * rotary.frequencies[None, None]
        cos, sin = (turn(angles)[:, :, None] * rotary.factor for turn in (jnp.cos, jnp.sin))
        first, second = jnp.split(k.reshape(*pos.shape, q.shape[1], -1), 2, -1)
        k = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
        dots = einsum_float32("bhgd,bshd->bhgs", q, k).reshape(*logits.shape[:2], -1)
        return logits.at[_where(pos, logits)].add(
            dots.swapaxes(1, 2), mode="drop", unique_indices=True
        )

    return _over_pages(table, pool.page_size, visit, logits, side=0, count=count)


def _where(pos: Int[Array, "B S"], by_position: Float[Array, "B H L"]):
    """Index of the slots' positions; free slots get one apiece that is not there."""
    rows, _, span = by_position.shape
    free = span + jnp.arange(pos.shape[1], dtype=jnp.int32)[None]
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    return row, slice(None), jnp.where(pos < 0, free, pos)


def _mark(live: Array, pos: Int[Array, "B S"]) -> Array:
    row = jnp.arange(len(live), dtype=jnp.int32)[:, None]
    return live.at[row, jnp.where(pos < 0, live.shape[1], pos)].set(True, mode="drop")


def _weighted(weights, pool, table, width: int):
    """Sums of the values' components by the attention of each query head."""
    count = blocks_of(pool, table, width)
    rows, heads, span = weights.shape

    def visit(block, pages, sums):
        x, pos = _read(pool, pages)
        mine = jnp.take_along_axis(weights, jnp.clip(pos, 0, span - 1)[:, None], 2)
        return sums.at[:, :, block].add(einsum_float32("bhs,bsw->bhw", mine, x))

    sums = jnp.zeros((rows, heads, count, width // count), jnp.float32)
    sums = _over_pages(table, pool.page_size, visit, sums, side=1, count=count)
    return sums.reshape(rows, heads, width)


def _softmax(logits: Array, live: Array, sinks: Float[Array, " Hq"] | None):
    """Weights, zero where nothing is live, and the log-sum-exp, sink included."""
    logits = jnp.where(live, logits, NEG_INF)
    top = logits.max(-1)
    if sinks is not None:
        top = jnp.maximum(top, sinks.astype(jnp.float32)[None])
    weights = jnp.where(live, jnp.exp(logits - top[..., None]), 0.0)
    total = weights.sum(-1)
    if sinks is not None:
        total += jnp.exp(sinks.astype(jnp.float32)[None] - top)
    lse = jnp.where(total > 0, top + jnp.log(jnp.maximum(total, 1e-30)), -jnp.inf)
    return weights / jnp.maximum(total, 1e-30)[..., None], lse
