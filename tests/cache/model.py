"""One small cache, what it is in plain Python, and operations that are done to both.

After every operation ``Machine`` compares all that the cache holds with the model. Whatever must
not be read is made to show: tokens that are not kept are NaN, and before attention so are the pages
that no table names, while free slots of the other pages hold large numbers.
"""

import collections
import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import (
    ClassGeometry,
    FreeList,
    Geometry,
    KVCache,
    LayerGeometry,
    append,
    compact,
    evict,
    init_cache,
    reserve,
    reset_rows,
    store,
)
from kvjax.cache import held as held_by_rows
from kvjax.codecs import kv_codec
from pallas_kernels import SCRATCH_PAGE, paged_attention

ROWS, HEADS, GROUP, DIM, TOKENS = 3, 2, 2, 8, 8
SCALE, GARBAGE, ZERO = DIM**-0.5, np.float32(1e6), np.float32(0)
CLASSES = (
    ClassGeometry(kv_codec("bf16"), page_size=16, pages_per_head=2),
    ClassGeometry(kv_codec("bf16"), page_size=4, pages_per_head=3),
    ClassGeometry(kv_codec("bf16"), page_size=4, pages_per_head=2, mass=True),
)
PAGES = (13, 12, 9)
"""Pages of every pool, scratch included. Only those of the first class are enough for all heads."""
GEOMETRY = Geometry(
    layers=(LayerGeometry(CLASSES),),
    rows=ROWS,
    num_heads=HEADS * GROUP,
    num_kv_heads=HEADS,
    head_dim=DIM,
    dtype=jnp.dtype("float32"),
)


@dataclasses.dataclass(frozen=True)
class Operation:
    """What to do, to which class, and the seed of everything else about it."""

    kind: str
    index: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Token:
    """What a live slot must hold, byte for byte."""

    k: np.ndarray
    v: np.ndarray
    bias: np.float32 = ZERO
    mass: np.float32 = ZERO


@dataclasses.dataclass(frozen=True)
class Held:
    """What the layer holds, copied out of the device."""

    pools: tuple[types.SimpleNamespace, ...]
    tables: tuple[np.ndarray, ...]
    free: tuple[types.SimpleNamespace, ...]


@jax.jit
def start() -> KVCache:
    """An empty cache whose pools can run out of pages."""
    cache = init_cache(GEOMETRY)
    (layer,) = cache.layers
    pools = tuple(
        jax.tree.map(lambda array, pages=pages: array[:pages], pool)
        for pool, pages in zip(layer.pools, PAGES, strict=True)
    )
    free = tuple(
        FreeList(jnp.arange(pages - 1, 0, -1, dtype=jnp.int32), jnp.int32(pages - 1))
        for pages in PAGES
    )
    return dataclasses.replace(cache, layers=(dataclasses.replace(layer, pools=pools, free=free),))


def append_tokens(cache: KVCache, index, k, v, count, keep, ahead) -> KVCache:
    """Read ``count`` new tokens in every row, with room for ``ahead`` more, and keep some."""
    cache = reserve(cache, cache.length + count + ahead)
    layer = append(cache.layers[index], k, v, _positions(cache), keep)
    return dataclasses.replace(cache, layers=(layer,), length=cache.length + count)


def store_tokens(cache: KVCache, index, k, v, count, keep, mass) -> tuple[KVCache, jax.Array]:
    """Read ``count`` new tokens in every row and send some to a class."""
    layer, placed = store(cache.layers[0], index, k, v, _positions(cache), keep, mass)
    crowded = cache.crowded + (keep & ~placed).sum((1, 2), dtype=jnp.int32)
    cache = dataclasses.replace(
        cache, layers=(layer,), length=cache.length + count, crowded=crowded
    )
    return cache, placed


def evict_slots(cache: KVCache, index, keep) -> KVCache:
    return dataclasses.replace(cache, layers=(evict(cache.layers[0], index, keep),))


def compact_slots(cache: KVCache, index) -> KVCache:
    return dataclasses.replace(cache, layers=(compact(cache.layers[0], index),))


def empty_rows(cache: KVCache, index, rows) -> KVCache:
    return reset_rows(cache, rows)


def _positions(cache: KVCache) -> jax.Array:
    return cache.length[:, None] + jnp.arange(TOKENS, dtype=jnp.int32)[None]


def compiled(program):
    """A program of its own: what it calls is looked up anew, even if it was compiled before."""

    @functools.wraps(program)
    def fresh(*arguments):
        return program(*arguments)

    return jax.jit(fresh, static_argnums=1, donate_argnums=0)


PROGRAMS = {
    "append": compiled(append_tokens),
    "store": compiled(store_tokens),
    "evict": compiled(evict_slots),
    "compact": compiled(compact_slots),
    "reset": compiled(empty_rows),
}
"""Every operation on the cache, compiled once for all sequences; mutants replace one."""

used = jax.jit(held_by_rows)
attend = jax.jit(functools.partial(paged_attention, scale=SCALE))


class Machine:
    """A cache and its model, side by side.

    Attributes:
        tokens: for each class, by row, head and position: what is live.
        places: for each class, likewise: the page and the slot where it was first seen.
        skipped: tokens of a row and head that were not kept, or found no slot.
        gone: those that were stored and are not live any more.
        reserved: tokens that the first class has pages for.
        seen: how often something worth testing has happened, over all sequences.
    """

    def __init__(self, seen: collections.Counter):
        self.cache, self.seen = start(), seen
        self.tokens: tuple[dict[tuple[int, int, int], Token], ...] = ({}, {}, {})
        self.places: tuple[dict[tuple[int, int, int], tuple[int, int]], ...] = ({}, {}, {})
        self.length, self.reserved, self.crowded = np.zeros((3, ROWS), np.int32)
        self.skipped, self.gone = np.zeros((2, ROWS, HEADS), np.int32)
        self._look()
        self.check()

    def do(self, operation: Operation) -> None:
        rng = np.random.default_rng(operation.seed)
        getattr(self, operation.kind)(rng, operation.index)

    # Operations. Each one checks what it alone promises; ``check`` checks the rest.

    def append(self, rng, index: int) -> None:
        count, ahead = self._count(rng), rng.integers(0, 9, ROWS).astype(np.int32)
        keep = (np.arange(TOKENS) < count[:, None]) & (rng.random((ROWS, TOKENS)) < 0.9)
        k, v = _vectors(rng, keep[:, None].repeat(HEADS, 1))
        self._run("append", index, k.swapaxes(1, 2), v.swapaxes(1, 2), count, keep, ahead)
        self.reserved = np.maximum(self.reserved, self.length + count + ahead)
        capacity, tokens = CLASSES[0].capacity, self.tokens[0]
        self.skipped += (count - keep.sum(1))[:, None]
        for row, i in np.argwhere(keep):
            pos = int(self.length[row] + i)
            for head in range(HEADS):
                old = [
                    p
                    for r, h, p in tokens
                    if (r, h) == (row, head) and p % capacity == pos % capacity
                ]
                for p in old:
                    self._forget(0, (row, head, p))
                    self.seen["the oldest gave way"] += 1
                tokens[row, head, pos] = Token(k[row, head, i], v[row, head, i])
        self.length += count
        self.check()

    def store(self, rng, index: int, most: np.ndarray | None = None) -> None:
        """Send tokens to a class; to every head no more than ``most``, if given."""
        shape, before = CLASSES[index], self.now
        count = self._count(rng)
        keep = np.arange(TOKENS) < np.broadcast_to(count[:, None, None], (ROWS, HEADS, TOKENS))
        keep &= rng.random((ROWS, HEADS, TOKENS)) < rng.choice([0.5, 0.9, 1.0], (ROWS, HEADS, 1))
        if most is not None:
            keep &= keep.cumsum(-1) <= most[..., None]
        k, v = _vectors(rng, keep)
        mass = rng.random(keep.shape, np.float32)
        placed = np.array(self._run("store", index, k, v, count, keep, mass))

        table = before.tables[index]
        available = int(before.free[index].count)
        owned, live = (table != SCRATCH_PAGE).sum(-1), self._live(index)
        room = np.zeros_like(owned)
        for at in np.ndindex(ROWS, HEADS):
            holes = owned[at] * shape.page_size - live[at]
            lacking = int(keep[at].sum()) - holes
            wanted = min(max(-(-lacking // shape.page_size), 0), shape.pages_per_head - owned[at])
            granted = min(wanted, available)
            available -= granted
            room[at] = holes + granted * shape.page_size
            pages = self.now.tables[index][at]
            old = pages[: owned[at]]
            assert (old == table[at][: owned[at]]).all(), "owned pages stay where they are"
            assert (pages != SCRATCH_PAGE).sum() == owned[at] + granted, "pages taken"
            if granted:
                full = (self.now.pools[index].bias[old] > -np.inf).all()
                assert full, "a page is taken while slots of owned ones are free"
            self.seen["a page was taken"] += bool(granted)
            self.seen["a hole was filled"] += bool(holes and keep[at].any())
            self.seen["the pool ran dry"] += bool(granted < wanted)
            self.seen["a class was full"] += bool(keep[at].sum() > room[at] and granted == wanted)
        expected = keep & (keep.cumsum(-1) <= room[..., None])
        assert (placed == expected).all(), "tokens placed are those that there is room for"

        for row, head, i in np.argwhere(placed):
            token = Token(k[row, head, i], v[row, head, i], mass=mass[row, head, i])
            self.tokens[index][row, head, int(self.length[row] + i)] = token
        self.skipped += count[:, None] - placed.sum(-1)
        self.crowded += (keep & ~placed).sum((1, 2))
        self.length += count
        self.check()

    def evict(self, rng, index: int) -> None:
        table = self.now.tables[index]
        keep = rng.random((*table.shape, CLASSES[index].page_size))
        keep = keep < rng.choice([0.0, 0.4, 0.6, 0.8], (*table.shape[:2], 1, 1))
        positions, bias = (getattr(self.now.pools[index], name)[table] for name in ("pos", "bias"))
        live = bias > -np.inf
        self._run("evict", index, keep)
        for row, head, page, slot in np.argwhere(live & ~keep):
            self._forget(index, (row, head, int(positions[row, head, page, slot])))
        stays = (live & keep).any(-1) if index else table != SCRATCH_PAGE
        for at in np.ndindex(ROWS, HEADS):
            pages = table[at][stays[at]].tolist()
            padded = pages + [SCRATCH_PAGE] * (table.shape[2] - len(pages))
            assert self.now.tables[index][at].tolist() == padded, "pages with live slots stay"
        self.seen["a page was given back"] += bool((live.any(-1) & ~stays).any())
        self.check()

    def reuse(self, rng, index: int) -> None:
        """Evict, then store no more than the holes take: nothing but slots changes hands."""
        if not self.tokens[index]:
            self.store(rng, index)
        self.evict(rng, index)
        before = self.now
        owned = (before.tables[index] != SCRATCH_PAGE).sum(-1)
        self.store(rng, index, owned * CLASSES[index].page_size - self._live(index))
        assert (self.now.tables[index] == before.tables[index]).all()
        assert self.now.free[index].count == before.free[index].count

    def compact(self, rng, index: int) -> None:
        if rng.random() < 0.6:  # else there is rarely anything to move
            self.evict(rng, index)
        before = self.places[index].copy()
        self._run("compact", index)
        self.places[index].clear()
        self.check()
        moved = [key for key, place in self.places[index].items() if place != before[key]]
        weighted = [key for key in moved if self.tokens[index][key].bias]
        self.seen["a slot was moved"] += bool(moved)
        self.seen["a weighted slot was moved"] += bool(weighted)
        table = self.now.tables[index]
        pages, live = (table != SCRATCH_PAGE).sum(-1), self._live(index)
        assert (pages == -(-live // CLASSES[index].page_size)).all(), "as few pages as possible"
        lying = (self.now.pools[index].bias[table] > -np.inf).reshape(ROWS, HEADS, -1)
        assert (lying[..., :-1] >= lying[..., 1:]).all(), "live slots come first"

    def weigh(self, rng, index: int) -> None:
        """Let some slots stand for more or less mass than their own, as a compactor does."""
        (layer,), bias = self.cache.layers, self.now.pools[index].bias.copy()
        for key, (page, slot) in self.places[index].items():
            if rng.random() < 0.6:
                bias[page, slot] = rng.normal() * 2
                token = self.tokens[index][key]
                self.tokens[index][key] = dataclasses.replace(token, bias=bias[page, slot])
        pools = list(layer.pools)
        pools[index] = dataclasses.replace(pools[index], bias=jnp.array(bias))
        layer = dataclasses.replace(layer, pools=tuple(pools))
        self.cache = dataclasses.replace(self.cache, layers=(layer,))
        self._look()
        self.check()

    def reset(self, rng, index: int) -> None:
        rows = rng.permutation(ROWS) < rng.choice([1, 1, 1, 2, ROWS])
        self._run("reset", 0, rows)
        for c, tokens in enumerate(self.tokens):
            for key in [key for key in tokens if rows[key[0]]]:
                self._forget(c, key)
        for counts in (self.length, self.reserved, self.crowded, self.skipped, self.gone):
            counts[rows] = 0
        self.check()

    # What must always hold.

    def check(self) -> None:
        assert (np.array(self.cache.length) == self.length).all()
        assert (np.array(self.cache.crowded) == self.crowded).all()
        live = sum(self._live(index) for index in range(len(CLASSES)))
        assert (live + self.gone + self.skipped == self.length[:, None]).all()
        for index, pool in enumerate(self.now.pools):
            table, free = self.now.tables[index], self.now.free[index]
            owned = table != SCRATCH_PAGE
            assert (owned[..., :-1] >= owned[..., 1:]).all(), "scratch comes last in a table"
            unowned = free.pages[: free.count].tolist()
            ids = sorted(table[owned].tolist() + unowned)
            assert ids == list(range(1, PAGES[index])), "pages lost, shared or both"
            assert np.isneginf(pool.bias[[SCRATCH_PAGE, *unowned]]).all()
            assert (np.isfinite(pool.bias) | np.isneginf(pool.bias)).all()
            assert (pool.pos[np.isneginf(pool.bias)] == -1).all()
            assert np.isfinite(pool.k).all() and np.isfinite(pool.v).all()
            if index:
                assert (pool.bias[table[owned]] > -np.inf).any(-1).all(), "an empty page is owned"
            else:
                needed = np.minimum(-(-self.reserved // CLASSES[index].page_size), table.shape[2])
                assert (owned.sum(-1) == needed[:, None]).all()
            self._check_slots(index, pool, table)

    def _check_slots(self, index: int, pool: Any, table: np.ndarray) -> None:
        """Every token is where it was, and what it was; nothing else is live."""
        tokens, places = self.tokens[index], self.places[index]
        row, head, page, slot = np.nonzero(pool.bias[table] > -np.inf)
        page = table[row, head, page]
        keys = list(zip(row.tolist(), head.tolist(), pool.pos[page, slot].tolist(), strict=True))
        assert len(keys) == len(tokens) and set(keys) == tokens.keys(), "other tokens are live"
        if not keys:
            return
        held = [tokens[key] for key in keys]
        same = {
            "k": pool.k[page, slot].tobytes() == np.stack([t.k for t in held]).tobytes(),
            "v": pool.v[page, :, slot].tobytes() == np.stack([t.v for t in held]).tobytes(),
            "bias": pool.bias[page, slot].tobytes() == np.stack([t.bias for t in held]).tobytes(),
            "mass": pool.mass is None
            or pool.mass[page, slot].tobytes() == np.stack([t.mass for t in held]).tobytes(),
        }
        assert all(same.values()), f"live slots changed: {same}"
        for key, place in zip(keys, zip(page.tolist(), slot.tolist(), strict=True), strict=True):
            assert places.setdefault(key, place) == place, "a live slot moved"
        if index == 0:
            pos = pool.pos[page, slot]
            assert (slot == pos % CLASSES[index].page_size).all()
            assert (
                page == table[row, head, pos // CLASSES[index].page_size % table.shape[2]]
            ).all()

    def check_end(self, seed: int) -> None:
        slots, pages = (np.array(x) for x in used(self.cache))
        for index, table in enumerate(self.now.tables):
            assert (slots[:, 0, index] == self._live(index).sum(1)).all()
            assert (pages[:, 0, index] == (table != SCRATCH_PAGE).sum((1, 2))).all()
        self._check_attention(seed)

    def _check_attention(self, seed: int) -> None:
        """Attention over the pages is attention over the tokens, whatever free slots hold."""
        rng = np.random.default_rng(seed)
        q = rng.standard_normal((ROWS, HEADS * GROUP, DIM), np.float32)
        (layer,) = self.cache.layers
        pools = tuple(
            dataclasses.replace(pool, **_poisoned(rng, held, table))
            for pool, held, table in zip(layer.pools, self.now.pools, self.now.tables, strict=True)
        )
        out, lse = (np.array(x) for x in attend(jnp.array(q), pools, layer.tables))
        for row, query_head in np.ndindex(q.shape[:2]):
            at = row, query_head // GROUP
            held = [t for tokens in self.tokens for key, t in tokens.items() if key[:2] == at]
            if not held:
                assert (out[row, query_head] == 0).all() and np.isneginf(lse[row, query_head])
                continue
            k, v, bias = (
                np.stack([getattr(t, name) for t in held]).astype(np.float64)
                for name in ("k", "v", "bias")
            )
            logits = k @ q[row, query_head].astype(np.float64) * SCALE + bias
            total = np.logaddexp.reduce(logits)
            expected = np.exp(logits - total) @ v
            np.testing.assert_allclose(out[row, query_head], expected, rtol=0, atol=1e-5)
            np.testing.assert_allclose(lse[row, query_head], total, rtol=0, atol=1e-5)

    def _run(self, name: str, index: int, *arguments) -> Any:
        """Run a program on the cache; what it returns beside the cache."""
        found = PROGRAMS[name](self.cache, index, *arguments)
        self.cache, rest = found if isinstance(found, tuple) else (found, None)
        self._look()
        return rest

    def _look(self) -> None:
        (layer,) = self.cache.layers
        self.now = Held(
            pools=tuple(_held(pool, "k", "v", "bias", "pos", "mass") for pool in layer.pools),
            tables=tuple(np.array(table) for table in layer.tables),
            free=tuple(_held(free, "pages", "count") for free in layer.free),
        )

    def _count(self, rng) -> np.ndarray:
        """How many tokens every row reads."""
        reading = rng.random(ROWS) < 0.8
        return np.where(reading, rng.integers(1, TOKENS + 1, ROWS), 0).astype(np.int32)

    def _live(self, index: int) -> np.ndarray:
        """Live tokens of every row and head, of a class, in the model."""
        live = np.zeros((ROWS, HEADS), np.int64)
        for row, head, _ in self.tokens[index]:
            live[row, head] += 1
        return live

    def _forget(self, index: int, key: tuple[int, int, int]) -> None:
        row, head, _ = key
        del self.tokens[index][key]
        self.places[index].pop(key)
        self.gone[row, head] += 1


def _held(part: Any, *names: str) -> types.SimpleNamespace:
    # Copies: a view of a donated buffer would show what comes after.
    arrays = {name: getattr(part, name) for name in names}
    return types.SimpleNamespace(
        **{name: None if array is None else np.array(array) for name, array in arrays.items()}
    )


def _vectors(rng, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values, NaN where they are not kept."""
    size = (*keep.shape, DIM)
    k, v = (rng.standard_normal(size, np.float32) for _ in range(2))
    return tuple(np.where(keep[..., None], x, np.float32(np.nan)) for x in (k, v))


def _poisoned(rng, pool: types.SimpleNamespace, table: np.ndarray) -> dict[str, jax.Array]:
    """What a pool holds, with garbage wherever there is no token."""
    free = np.isneginf(pool.bias)
    pages = np.arange(len(pool.k))
    nameless = ~np.isin(pages, table) & (pages != SCRATCH_PAGE)
    size = (*free.shape, DIM)
    k, v = (rng.standard_normal(size, np.float32) * GARBAGE for _ in range(2))
    k[nameless] = v[nameless] = np.nan
    arrays = {
        "k": np.where(free[..., None], k, pool.k),
        "v": np.where(free[:, None], v.swapaxes(1, 2), pool.v),
        "bias": np.where(nameless[:, None], ZERO, pool.bias),  # looks alive
        "pos": np.where(free, rng.integers(-(2**31), 2**31, free.shape, np.int32), pool.pos),
    }
    return {name: jnp.array(array) for name, array in arrays.items()}
