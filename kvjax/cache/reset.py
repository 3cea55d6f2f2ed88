"""Rows that start again: empty, and their pages free for others."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.cache.cache import KVCache, LayerCache
from kvjax.cache.pages import give_pages
from kvjax.cache.slots import evict, replace_class
from kvjax.thoughts.state import no_thoughts
from pallas_kernels import SCRATCH_PAGE, KVPages


def reset_rows(cache: KVCache, rows: Bool[Array, " B"]) -> KVCache:
    """Empty some rows and give back all their pages, so that they can start again."""
    layers = tuple(reset_layer(layer, rows) for layer in cache.layers)
    return reset_counters(dataclasses.replace(cache, layers=layers), rows)


def reset_layer(
    layer: LayerCache, rows: Bool[Array, " B"], lent: Int[Array, ""] | int = 0
) -> LayerCache:
    """One layer of ``reset_rows``.

    The pages come back zeroed: a NaN that a row has left must not meet a later owner's attention
    weight of zero.

    Args:
        lent: how many of the first pages of a KV head are somebody else's (``copy_rows``).
    """
    for index, table in enumerate(layer.tables):
        place = jnp.arange(table.shape[2], dtype=jnp.int32)[None, None]
        borrowed = rows[:, None, None] & (place < lent)
        table = jnp.where(borrowed, SCRATCH_PAGE, table)
        layer = replace_class(layer, index, tables=table)
        keep = jnp.broadcast_to(
            ~rows[:, None, None, None], (*table.shape, layer.pools[index].page_size)
        )
        pages = jnp.where(rows[:, None, None], table, SCRATCH_PAGE)
        layer = replace_class(layer, index, pools=_zeroed(layer.pools[index], pages))
        layer = evict(layer, index, keep)
        owned = jnp.broadcast_to(rows[:, None, None], table.shape)
        table, free = give_pages(layer.free[index], layer.tables[index], owned)
        layer = replace_class(layer, index, tables=table, free=free)
    return layer


def reset_counters(cache: KVCache, rows: Bool[Array, " B"]) -> KVCache:
    """The rest of ``reset_rows``: what rows have beside their pages."""
    counters = {
        name: jnp.where(rows, 0, getattr(cache, name))
        for name in ("length", "prompt", "stored", "crowded")
    }
    if cache.ledger is not None:
        tokens = jnp.where(rows[:, None], 0, cache.ledger.tokens)
        counters["ledger"] = dataclasses.replace(cache.ledger, tokens=tokens)
    if cache.thoughts is not None:
        none = no_thoughts(*cache.thoughts.kind.shape)
        counters["thoughts"] = jax.tree.map(
            lambda new, old: jnp.where(rows[:, None], new, old), none, cache.thoughts
        )
    return dataclasses.replace(cache, **counters)


def _zeroed(pool: KVPages, pages: Int[Array, "B Hkv P"]) -> KVPages:
    names = ("k", "v", "k_scale", "v_scale", "k_zero", "v_zero")
    held = {name: getattr(pool, name) for name in names}
    zero = {
        name: array.at[pages].set(jnp.zeros((), array.dtype))
        for name, array in held.items()
        if array is not None
    }
    return dataclasses.replace(pool, **zero)
