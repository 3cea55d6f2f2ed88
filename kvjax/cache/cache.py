"""The cache pytree, how it is made and what it holds."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.cache.plan import Geometry
from pallas_kernels import SCRATCH_PAGE, KVPages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FreeList:
    """A stack of the pages that nobody owns.

    Attributes:
        pages: page ids; only the first ``count`` are free.
        count: how many are.
    """

    pages: Int[Array, " free_pages"]
    count: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """What one layer holds: for each codec class a pool, its block tables and its free list.

    A table entry is the page of that row and KV head, ``SCRATCH_PAGE`` where there is none yet.
    """

    pools: tuple[KVPages, ...]
    tables: tuple[Int[Array, "B Hkv P"], ...]
    free: tuple[FreeList, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The whole cache; donated to, and returned by, every program that changes it.

    Three numbers are never confused: ``length``, the logical position of a row's next token, which
    only grows; the live slots, those with ``bias > -inf``; and the slot where the next token goes.

    Attributes:
        layers: one ``LayerCache`` a layer, never stacked: a scan over stacked ones would copy them.
        length: tokens read so far in each row.
    """

    layers: tuple[LayerCache, ...]
    length: Int[Array, " B"]


def init_cache(geometry: Geometry) -> KVCache:
    """An empty cache, with every buffer its own (a donated pytree may hold none twice).

    Free slots are zero, not unset: an attention weight of zero must not meet a NaN.
    """
    layers = tuple(_init_layer(geometry) for _ in range(geometry.num_layers))
    return KVCache(layers, jnp.zeros(geometry.rows, jnp.int32))


def _init_layer(geometry: Geometry) -> LayerCache:
    pages, page, dim = geometry.pages, geometry.page_size, geometry.head_dim
    pool = KVPages(
        k=jnp.zeros((pages, page, dim), geometry.dtype),
        v=jnp.zeros((pages, dim, page), geometry.dtype),
        bias=jnp.full((pages, page), -jnp.inf, jnp.float32),
        pos=jnp.full((pages, page), -1, jnp.int32),
    )
    shape = (geometry.rows, geometry.num_kv_heads, geometry.pages_per_head)
    table = jnp.full(shape, SCRATCH_PAGE, jnp.int32)
    # Popped from the end, so the lowest ids go first.
    stack = jnp.arange(pages - 1, 0, -1, dtype=jnp.int32)
    free = FreeList(stack, jnp.asarray(pages - 1, jnp.int32))
    return LayerCache((pool,), (table,), (free,))


def usage(cache: KVCache) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Live slots and owned pages of every row, over all layers and KV heads."""
    slots = pages = jnp.zeros(cache.length.shape, jnp.int32)
    for layer in cache.layers:
        for pool, table in zip(layer.pools, layer.tables, strict=True):
            live = pool.bias[table] > -jnp.inf
            slots += live.sum((1, 2, 3), dtype=jnp.int32)
            pages += (table != SCRATCH_PAGE).sum((1, 2), dtype=jnp.int32)
    return slots, pages
