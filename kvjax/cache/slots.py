"""Where tokens go: pages from the free list, slots in pages, and the stores into them."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.cache import FreeList, KVCache, LayerCache
from pallas_kernels import SCRATCH_PAGE, write_slots


def reserve(cache: KVCache, length: Int[Array, " B"]) -> KVCache:
    """Give every row the pages that it needs to hold ``length`` tokens; what it has it keeps.

    Done once for many steps, so that a step itself never touches a free list. The planner sizes
    the pools so that the pages are there.
    """
    layers = tuple(_reserve_layer(layer, length) for layer in cache.layers)
    return dataclasses.replace(cache, layers=layers)


def _reserve_layer(layer: LayerCache, length: Int[Array, " B"]) -> LayerCache:
    (pool,), (table,), (free,) = layer.pools, layer.tables, layer.free
    needed = -(-length // pool.page_size)
    index = jnp.arange(table.shape[2], dtype=jnp.int32)
    missing = (table == SCRATCH_PAGE) & (index[None] < needed[:, None])[:, None]
    table, free = _take_pages(free, table, missing)
    return LayerCache((pool,), (table,), (free,))


def _take_pages(
    free: FreeList, table: Int[Array, "B Hkv P"], missing: Bool[Array, "B Hkv P"]
) -> tuple[Int[Array, "B Hkv P"], FreeList]:
    order = jnp.cumsum(missing.ravel(), dtype=jnp.int32).reshape(missing.shape)
    taken = free.pages.at[free.count - order].get(mode="fill", fill_value=SCRATCH_PAGE)
    count = free.count - missing.sum(dtype=jnp.int32)
    return jnp.where(missing, taken, table), FreeList(free.pages, count)


def append(
    layer: LayerCache,
    k: Float[Array, "B T Hkv D"],
    v: Float[Array, "B T Hkv D"],
    pos: Int[Array, "B T"],
    keep: Bool[Array, "B T"],
) -> LayerCache:
    """Store tokens at the slots of their logical positions, whose pages are reserved already.

    Tokens that are not to be kept (padding, finished rows) go to the scratch page.
    """
    (pool,), (table,), free = layer.pools, layer.tables, layer.free
    pages = jnp.take_along_axis(table, (pos // pool.page_size)[:, None], 2, mode="clip")
    pages = jnp.where(keep[:, None], pages, SCRATCH_PAGE)  # [B, Hkv, T]
    slots = jnp.broadcast_to((pos % pool.page_size)[:, None], pages.shape)
    # Zeros to the scratch page, which every row's table is padded with: a NaN of one row must not
    # meet another row's attention weight of zero.
    k, v = (
        jnp.where(keep[:, None, :, None], x.swapaxes(1, 2), 0).astype(pool.k.dtype) for x in (k, v)
    )
    pool = write_slots(pool, pages, slots, k, v, pos)
    return LayerCache((pool,), (table,), free)
