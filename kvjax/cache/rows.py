"""Some rows of a cache as a cache of their own, whose pages and free lists are the same ones."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.cache.cache import KVCache
from kvjax.cache.pages import take_pages
from kvjax.sharding import per_shard
from kvjax.thoughts.state import no_thoughts
from pallas_kernels import SCRATCH_PAGE
from pallas_kernels.layout import SLOT_AXIS

_COUNTERS = ("length", "prompt", "stored", "crowded", "thoughts")


def take_rows(cache: KVCache, rows: Int[Array | np.ndarray, " K"]) -> KVCache:
    """The given rows alone. Pools and free lists are shared, not copied.

    Whatever changes the one makes the other useless, until ``put_rows`` joins them again.
    """
    return _with_own(cache, _taken(_own(cache), rows))


def put_rows(cache: KVCache, part: KVCache, rows: Int[Array | np.ndarray, " K"]) -> KVCache:
    """The cache that rows were taken from, with what has become of them.

    Args:
        cache: whose pages may have been donated since; what rows have for themselves is donated.
        part: what ``take_rows`` returned, or what has been made of it.
        rows: the same as then.
    """
    return _with_own(part, put_each(_own(cache), _own(part), rows))


def with_pages(cache: KVCache, newer: KVCache) -> KVCache:
    """The rows of a cache, with the pages of another one that was made of the same pages."""
    return _with_own(newer, _own(cache))


def blank_row(cache: KVCache) -> KVCache:
    """A row beside those of the cache, which owns no page yet; the pages are shared."""
    return _with_own(cache, _blank(_own(cache)))


def copy_rows(cache: KVCache, lent: Sequence[int]) -> KVCache:
    """Rows that hold what the rows of a cache hold, which stay as they are.

    Args:
        cache: the layers' pages are donated; what its rows have for themselves is not.
        lent: for every layer, how many of the first pages of a KV head are not copied: the tables
            of both name them, and neither may write to them. 0 but where a layer has one class.
    """
    layers = tuple(
        dataclasses.replace(
            layer, **_copied_pages(layer.pools, layer.free, layer.tables, np.int32(count))
        )
        for layer, count in zip(cache.layers, lent, strict=True)
    )
    own = _copied(_own(cache))
    fresh = dataclasses.replace(cache, layers=layers)
    own["layers"] = [
        (layer.tables, queries) for layer, (_, queries) in zip(layers, own["layers"], strict=True)
    ]
    return _with_own(fresh, own)


@functools.partial(jax.jit, donate_argnums=(0, 1))
@per_shard
def _copied_pages(pools, free, tables, lent) -> dict[str, Any]:
    copied = []
    for pool, left, table in zip(pools, free, tables, strict=True):
        index = jnp.arange(table.shape[2], dtype=jnp.int32)[None, None]
        own = (table != SCRATCH_PAGE) & (index >= lent)
        kept = jnp.where(index < lent, table, SCRATCH_PAGE)
        new, left = take_pages(left, kept, own.sum(-1, dtype=jnp.int32))
        source, place = (jnp.where(own, pages, SCRATCH_PAGE) for pages in (table, new))
        moved = {
            name: array.at[place].set(array[source])
            for name in SLOT_AXIS
            if (array := getattr(pool, name)) is not None
        }
        copied.append((dataclasses.replace(pool, **moved), new, left))
    return dict(zip(("pools", "tables", "free"), zip(*copied, strict=True), strict=True))


@jax.jit
def _copied(own):
    # Buffers of their own: one is donated with the new row, the other stays.
    return jax.tree.map(lambda leaf: leaf + jnp.zeros((), leaf.dtype), own)


@jax.jit
def _blank(own):
    blank = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape[1:]), leaf.dtype), own)
    if own["thoughts"] is not None:
        blank["thoughts"] = no_thoughts(1, own["thoughts"].kind.shape[1])
    return blank


def _own(cache: KVCache) -> dict[str, Any]:
    """What every row has for itself."""
    own = {name: getattr(cache, name) for name in _COUNTERS}
    own["layers"] = [(layer.tables, layer.queries) for layer in cache.layers]
    own["noted"] = None if cache.ledger is None else cache.ledger.tokens
    return own


def _with_own(cache: KVCache, own: dict[str, Any]) -> KVCache:
    """The cache with other rows."""
    layers = tuple(
        dataclasses.replace(layer, tables=tables, queries=queries)
        for layer, (tables, queries) in zip(cache.layers, own["layers"], strict=True)
    )
    ledger = cache.ledger
    if ledger is not None:
        ledger = dataclasses.replace(ledger, tokens=own["noted"])
    counters = {name: own[name] for name in _COUNTERS}
    return dataclasses.replace(cache, layers=layers, ledger=ledger, **counters)


@jax.jit
def _taken(own, rows):
    return jax.tree.map(lambda leaf: leaf[rows], own)


@functools.partial(jax.jit, donate_argnums=0)
def put_each(own, new, rows):
    """Trees of arrays with a row axis: ``own`` (donated) with ``new`` in the given rows."""
    return jax.tree.map(lambda old, leaf: old.at[rows].set(leaf), own, new)
