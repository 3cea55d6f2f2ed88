"""Some rows of a cache as a cache of their own, whose pages and free lists are the same ones."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from kvjax.cache.cache import KVCache

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
