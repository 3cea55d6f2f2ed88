"""Latents in a cache: how a token's are made, and what a chunk of tokens reads of them."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.cache import LayerCache
from kvjax.dynakv.coder import Coder
from kvjax.models.attention import NEG_INF, biased_attention, merge
from kvjax.models.config import ModelConfig
from kvjax.models.rope import inverse_frequencies, rotate, rotation
from kvjax.sharding.across import gathered
from pallas_kernels import SCRATCH_PAGE, KVPages, latent_attention
from pallas_kernels.latent_attention.layout import Rotary
from pallas_kernels.read import plain_slot_keys

SLOTS = 512
"""Tokens that are rebuilt at once."""


def latents(
    coder: Coder, k: Float[Array, "B T Hkv D"], v: Float[Array, "B T Hkv D"], dtype: DTypeLike
) -> Float[Array, "B T 2 d"]:
    """What is kept of tokens: components of keys and of values, zero behind a token's ranks.

    Devices that share the heads all get the same.

    Args:
        coder: the layer's.
        k: keys before their rotation.
        v: values.
        dtype: of the result, the cache's.
    """
    x = gathered(jnp.stack([k, v]), 3)
    made = coder.latents(x.reshape(*x.shape[:3], -1))
    return jnp.moveaxis(made.astype(dtype), 0, 2)


def as_stored(
    latent: Float[Array, "B T 2 d"],
) -> tuple[Float[Array, "B T 2 d"], Float[Array, "B T 2 0"]]:
    """Latents in the place of keys, and nothing in that of values."""
    return latent, jnp.zeros((*latent.shape[:3], 0), latent.dtype)


def rebuilt(
    coder: Coder, latent: Float[Array, "B T 2 d"], pos: Int[Array, "B T"], config
) -> tuple[Float[Array, "B T Hkv D"], Float[Array, "B T Hkv D"]]:
    """Float32 keys, rotated to their positions, and values: a device's own heads of them."""
    wide = latent.astype(jnp.float32)
    k, v = (
        basis.rebuild(wide[:, :, side]).reshape(*pos.shape, -1, config.head_dim)
        for side, basis in enumerate(coder.bases())
    )
    return rotate(k, *rotation(pos, config.rope, config.head_dim)), v


def in_blocks(
    layer: LayerCache, index: int, latent: Float[Array, "B 2 T d"], keep: Bool[Array, "B 2 T"]
) -> tuple[Float[Array, "B N T W"], Bool[Array, "B N T"]]:
    """Latents cut into the blocks of a class, and which of those hold anything to be stored.

    The first blocks are stored whatever they hold. Others are where a component is not zero: that
    of a token's rank, or one behind it in the same block. A block of zeros says nothing.
    """
    rows, _, tokens, width = latent.shape
    count = layer.tables[index].shape[1] // 2
    cut = latent.reshape(rows, 2, tokens, count, width // count)
    cut = jnp.moveaxis(cut, 3, 1)  # [B, n, 2, T, W]
    first = (jnp.arange(count, dtype=jnp.int32) == 0)[None, :, None, None]
    keep = keep[:, None] & ((cut != 0).any(-1) | first)
    return cut.reshape(rows, 2 * count, tokens, -1), keep.reshape(rows, 2 * count, tokens)


def attend_step(
    layer: LayerCache,
    q: Float[Array, "B Hq D"],
    tables: list[Int[Array, "B _ _"]],
    config: ModelConfig,
    *,
    q_pos: Int[Array, " B"],
    span: int,
    window: int | None,
    sinks: Float[Array, " Hq"] | None,
    implementation=None,
) -> Float[Array, "B Hq D"]:
    """Float32 attention of one token a row to all that the layer holds."""
    frequencies, factor = inverse_frequencies(config.rope, config.head_dim)
    return latent_attention(
        q,
        layer.pools,
        tables,
        *layer.coder.bases(),
        Rotary(jnp.asarray(frequencies), factor),
        scale=config.scale,
        span=span,
        q_pos=q_pos,
        window=window,
        sinks=sinks,
        implementation=implementation,
    )[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens that a class holds, whose blocks lie in slots of their own.

    Attributes:
        pos: positions by slot of the keys' first block, which every token has; -1: there is none.
        slot: by line of the table and position, where the block is: page of the line times slots
            of a page, plus slot; -1: nowhere.
    """

    pos: Int[Array, "B S"]
    slot: Int[Array, "B N L"]


def find_tokens(pool: KVPages, table: Int[Array, "B N P"], span: int) -> Tokens:
    """Where the blocks of every token are."""
    rows, lines, _ = table.shape
    pos = pool.pos[table].reshape(rows, lines, -1)
    row, line = (jnp.arange(n, dtype=jnp.int32) for n in (rows, lines))
    where = row[:, None, None], line[None, :, None], jnp.where(pos < 0, span, pos)
    order = jnp.broadcast_to(jnp.arange(pos.shape[2], dtype=jnp.int32)[None, None], pos.shape)
    slot = jnp.full((rows, lines, span), -1, jnp.int32).at[where].set(order, mode="drop")
    return Tokens(pos[:, 0], slot)


def places(
    pool: KVPages, table: Int[Array, "B N P"], tokens: Tokens, pos: Int[Array, "B T"]
) -> tuple[Int[Array, "B N T"], Int[Array, "B N T"]]:
    """Page and slot of every block of the tokens at some positions; the scratch page for none."""
    at = jnp.broadcast_to(jnp.maximum(pos, 0)[:, None], (*table.shape[:2], pos.shape[1]))
    slot = jnp.where((pos >= 0)[:, None], jnp.take_along_axis(tokens.slot, at, 2), -1)
    place = jnp.maximum(slot, 0)
    pages = jnp.take_along_axis(table, place // pool.page_size, 2)
    return jnp.where(slot < 0, SCRATCH_PAGE, pages), place % pool.page_size


def read_tokens(
    pool: KVPages, table: Int[Array, "B N P"], tokens: Tokens, pos: Int[Array, "B T"]
) -> Float[Array, "B T 2 d"]:
    """Float32 latents of the tokens at some positions, zero where there is none."""
    rows, lines, _ = table.shape
    pages, slots = places(pool, table, tokens, pos)
    parts = plain_slot_keys(pool, pages, slots, jnp.float32)
    parts = jnp.where((pages != SCRATCH_PAGE)[..., None], parts, 0)
    parts = parts.reshape(rows, lines // 2, 2, pos.shape[1], -1)
    return jnp.moveaxis(parts, 1, 3).swapaxes(1, 2).reshape(rows, pos.shape[1], 2, -1)


def held_keys(
    layer: LayerCache, index: int, config: ModelConfig
) -> tuple[Float[Array, "B Hkv S D"], Int[Array, "B S"]]:
    """Rotated float32 keys of all tokens that a class holds, and their positions; -1: none."""
    pool, table = layer.pools[index], layer.tables[index]
    tokens = find_tokens(pool, table, layer.span)
    latent = read_tokens(pool, table, tokens, tokens.pos)
    return rebuilt(layer.coder, latent, tokens.pos, config)[0].swapaxes(1, 2), tokens.pos


def attend_history(
    layer: LayerCache,
    config: ModelConfig,
    window: int | None,
    q: Float[Array, "B T Hq D"],
    positions: Int[Array, "B T"],
) -> tuple[Float[Array, "B T Hq D"], Float[Array, "B T Hq"]]:
    """Attention of new tokens to what the layer holds, some tokens of it rebuilt at a time.

    Returns:
        The float32 output and the log-sum-exp.
    """
    carry = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], NEG_INF, jnp.float32)
    for pool, table in zip(layer.pools, layer.tables, strict=True):
        tokens = find_tokens(pool, table, layer.span)
        step = min(tokens.pos.shape[1], SLOTS)
        held = jnp.pad(tokens.pos, ((0, 0), (0, -tokens.pos.shape[1] % step)), constant_values=-1)
        owned = (table[:, 0] != SCRATCH_PAGE).sum(-1, dtype=jnp.int32).max() * pool.page_size

        def some(i, carry, pool=pool, table=table, tokens=tokens, held=held, step=step):
            pos = jax.lax.dynamic_slice_in_dim(held, i * step, step, 1)
            latent = read_tokens(pool, table, tokens, pos)
            k, v = rebuilt(layer.coder, latent, pos, config)
            seen = (pos >= 0)[:, None]
            if window is not None:
                seen &= positions[:, :, None] - pos[:, None] < window
            bias = jnp.where(seen, 0.0, -jnp.inf)[:, None]
            k, v = (x.swapaxes(1, 2).astype(q.dtype) for x in (k, v))
            return merge(*carry, *biased_attention(q, k, v, bias, config.scale))

        carry = jax.lax.fori_loop(0, -(-owned // step), some, carry)
    return carry
