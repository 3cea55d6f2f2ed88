"""The only row of a cache as arrays on the host: what it holds, without the pages that are free."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.cache import FreeList, KVCache, LayerCache
from kvjax.cache.slots import replace_class
from kvjax.errors import CapacityError
from kvjax.thoughts.state import NO_KIND, Thoughts, no_thoughts
from pallas_kernels import SCRATCH_PAGE, KVPages
from pallas_kernels.layout import SLOT_AXIS, UNKNOWN_LEVEL

Packed = Mapping[str, np.ndarray]
"""Arrays by name. Of layer 3's class 1, ``3.1.pages`` says how many pages each KV head owns, and
``3.1.k`` and the like what these hold, one head after the other, each in the order of its table.
Free slots hold nothing. ``3.queries``, ``thoughts.kind`` and the like, ``length``, ``prompt``,
``stored`` and ``crowded`` are the row's own."""
COUNTERS = ("length", "prompt", "stored", "crowded")
CONSTANTS = ("mean", "balance")
_EMPTY = {"bias": -np.inf, "pos": -1, "level": UNKNOWN_LEVEL}
"""What a free slot holds, where that is not 0."""


def pack_row(cache: KVCache, copies: int = 1) -> dict[str, np.ndarray]:
    """What the only row of a cache holds, on however many devices.

    A ledger is left out: it is the row's tokens.

    Args:
        cache: one of one row.
        copies: devices that hold the same KV head, of which one is asked.
    """
    packed = {name: np.asarray(getattr(cache, name)[0]) for name in COUNTERS}
    length = int(packed["length"])
    for place, layer, index in _classes(cache):
        pool, lines = layer.pools[index], _lines(layer, index, copies)
        first = np.unique(lines, return_index=True)[1]
        table = _everywhere(layer, index)[first]
        owned = table != SCRATCH_PAGE
        if index == 0:  # without those that were reserved for more
            owned &= np.arange(table.shape[1]) < -(-length // pool.page_size)
        packed[f"{place}.pages"] = owned.sum(1, dtype=np.int32)
        held = {name: np.asarray(array)[table[owned]] for name, array in _arrays(pool)}
        free = held["pos"] < 0
        if pool.bias is not None:  # what was evicted may still be attended
            free &= held["bias"] == -np.inf
        _clear(held, free)
        packed |= {f"{place}.{name}": array for name, array in held.items()}
        for name, constant in _arrays(pool, CONSTANTS):
            packed[f"{place}.{name}"] = np.array(constant)[first]
    for index, layer in enumerate(cache.layers):
        if layer.queries is not None:
            packed[f"{index}.queries"] = np.asarray(layer.queries[0])
    if cache.thoughts is not None:
        thoughts = jax.tree.map(lambda leaf: np.asarray(leaf[0]), cache.thoughts)
        known = np.flatnonzero((thoughts.kind != NO_KIND) | (thoughts.level > 0))
        count = int(known.max(initial=-1)) + 1
        for name, array in vars(thoughts).items():
            packed[f"thoughts.{name}"] = array if name == "demoted" else array[:count]
    return packed


def unpack_row(cache: KVCache, packed: Packed, tokens: Sequence[int], copies: int = 1) -> KVCache:
    """A cache whose only row holds what was packed, on whatever devices it is.

    Args:
        cache: one of one row; whatever it holds is overwritten.
        packed: what ``pack_row`` made of a row that was kept in the same way.
        tokens: that the row has read, by position.
        copies: devices that hold the same KV head.

    Raises:
        CapacityError: the pools have no room.
    """
    layers = list(cache.layers)
    for place, _, index in _classes(cache):
        number = int(place.partition(".")[0])
        layers[number] = _with_class(layers[number], index, packed, place, copies)
    for number, layer in enumerate(layers):
        if layer.queries is not None:
            queries = _put(packed[f"{number}.queries"][None], layer.queries)
            layers[number] = dataclasses.replace(layer, queries=queries)
    counters = {name: jnp.asarray(packed[name], jnp.int32)[None] for name in COUNTERS}
    cache = dataclasses.replace(cache, layers=tuple(layers), **counters)
    if cache.thoughts is not None:
        thoughts = _padded(packed, cache.thoughts.kind.shape[1])
        cache = dataclasses.replace(cache, thoughts=thoughts)
    if cache.ledger is not None:
        noted = np.zeros(cache.ledger.tokens.shape, np.int32)
        noted[0, : len(tokens)] = tokens
        ledger = dataclasses.replace(cache.ledger, tokens=jnp.asarray(noted))
        cache = dataclasses.replace(cache, ledger=ledger)
    return cache


def cut_row(packed: Packed, length: int) -> dict[str, np.ndarray]:
    """The row without its tokens from position ``length`` on, whose slots come free."""
    cut = {name: array.copy() for name, array in packed.items()}
    for place in [name.removesuffix(".pos") for name in packed if name.endswith(".pos")]:
        goes, counts = packed[f"{place}.pos"] >= length, packed[f"{place}.pages"]
        arrays = {name: cut[f"{place}.{name}"] for name in SLOT_AXIS if f"{place}.{name}" in cut}
        _clear(arrays, goes)
        within = np.concatenate([np.arange(count) for count in counts])
        if place.endswith(".0"):
            left = within < -(-length // goes.shape[1])
        else:
            left = (cut[f"{place}.pos"] >= 0).any(1)
        head = np.repeat(np.arange(len(counts)), counts)
        cut[f"{place}.pages"] = np.bincount(head[left], minlength=len(counts)).astype(np.int32)
        cut |= {f"{place}.{name}": array[left] for name, array in arrays.items()}
    for name in ("length", "prompt", "stored"):
        cut[name] = np.array(min(int(packed[name]), length), np.int32)
    return cut


def named(cache: KVCache) -> dict[str, jax.Array]:
    """A cache's arrays by the names of ``Packed``, and each class's table."""
    found = {}
    for place, layer, index in _classes(cache):
        pool = layer.pools[index]
        found[f"{place}.table"] = layer.tables[index]
        arrays = _arrays(pool, (*SLOT_AXIS, *CONSTANTS))
        found |= {f"{place}.{name}": array for name, array in arrays}
    for number, layer in enumerate(cache.layers):
        if layer.queries is not None:
            found[f"{number}.queries"] = layer.queries
    if cache.thoughts is not None:
        found |= {f"thoughts.{name}": array for name, array in vars(cache.thoughts).items()}
    return found


def _clear(arrays: Packed, slots: np.ndarray) -> None:
    """Empty some slots [pages, page] of a class, in place."""
    for name, array in arrays.items():
        if array.shape[SLOT_AXIS[name]] == slots.shape[1]:  # else it is shared among slots
            np.moveaxis(array, SLOT_AXIS[name], 1)[slots] = _EMPTY.get(name, 0)


def _classes(cache: KVCache) -> Iterator[tuple[str, LayerCache, int]]:
    """Every class of every layer, with the beginning of its names."""
    for number, layer in enumerate(cache.layers):
        for index in range(len(layer.pools)):
            yield f"{number}.{index}", layer, index


def _arrays(pool: KVPages, names: Iterable[str] = SLOT_AXIS) -> list[tuple[str, jax.Array]]:
    """What a pool holds of every page, or its constants."""
    return [(name, array) for name in names if (array := getattr(pool, name)) is not None]


def _with_class(
    layer: LayerCache, index: int, packed: Packed, place: str, copies: int
) -> LayerCache:
    """The layer with the pages of one class: the first ones of each device's pool."""
    pool, free, lines = layer.pools[index], layer.free[index], _lines(layer, index, copies)
    counts, width = packed[f"{place}.pages"], layer.tables[index].shape[2]
    devices, pages = free.count.size, len(pool.pos) // free.count.size
    owned = np.arange(width) < counts[lines][:, None]
    # The pages of every line in a row: where in its device's pool they go, where they come from.
    taken = owned.reshape(devices, -1).sum(1)
    if taken.max() >= pages or counts.max() > width:
        raise CapacityError(
            f"the cache holds {taken.max()} pages where a run of this size has {pages - 1}, and "
            f"{counts.max()} of a KV head where it has {width}: give more new tokens"
        )
    own = np.concatenate([np.arange(1, 1 + count) for count in taken])
    to = own + np.repeat(np.arange(devices) * pages, taken)
    source = np.split(np.arange(counts.sum()), np.cumsum(counts)[:-1])
    source = np.concatenate([source[line] for line in lines])
    changed = {}
    for name, old in _arrays(pool):
        whole = np.full(old.shape, _EMPTY.get(name, 0), old.dtype)
        whole[to] = packed[f"{place}.{name}"][source]
        changed[name] = _put(whole, old)
    for name, old in _arrays(pool, CONSTANTS):
        changed[name] = _put(packed[f"{place}.{name}"][lines], old)
    table = np.full(layer.tables[index].shape, SCRATCH_PAGE, np.int32)
    table[0, owned] = own
    stack = np.tile(np.arange(pages - 1, 0, -1, dtype=np.int32), devices)
    left = np.asarray(pages - 1 - taken, np.int32).reshape(free.count.shape)
    return replace_class(
        layer,
        index,
        pools=dataclasses.replace(pool, **changed),
        tables=_put(table, layer.tables[index]),
        free=FreeList(_put(stack, free.pages), _put(left, free.count)),
    )


def _lines(layer: LayerCache, index: int, copies: int) -> np.ndarray:
    """Of every line of a class's table, on all devices, the packed one that it is, or a copy of."""
    lines = np.arange(layer.tables[index].shape[1])
    if layer.coder is not None:  # all devices have all of them
        return lines % (len(lines) // layer.free[index].count.size)
    return lines // copies


def _everywhere(layer: LayerCache, index: int) -> np.ndarray:
    """The only row's table, with pages numbered across the pools of all devices."""
    table, devices = np.asarray(layer.tables[index][0]), layer.free[index].count.size
    before = np.arange(devices) * (len(layer.pools[index].pos) // devices)
    before = np.repeat(before, len(table) // devices)[:, None]
    return np.where(table == SCRATCH_PAGE, SCRATCH_PAGE, table + before)


def _put(array: np.ndarray, like: jax.Array) -> jax.Array:
    return jax.device_put(array, like.sharding)


def _padded(packed: Packed, segments: int) -> Thoughts:
    found = {}
    for name, blank in vars(no_thoughts(1, segments)).items():
        known = packed[f"thoughts.{name}"]
        found[name] = blank.at[0, : len(known)].set(known)
    return Thoughts(**found)
