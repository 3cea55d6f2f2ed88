"""Pages, tables and slots against a plain Python model of a cache, over random sequences."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import ClassGeometry, Geometry, KVCache, append, held, init_cache, reserve
from pallas_kernels import SCRATCH_PAGE, paged_attention


def only(geometry: Geometry) -> ClassGeometry:
    """The one class of all layers."""
    [shape] = {part for layer in geometry.layers for part in layer.classes}
    return shape


GEOMETRIES = [
    Geometry.full(
        num_layers=2,
        rows=4,
        num_kv_heads=2,
        head_dim=8,
        page_size=4,
        pages_per_head=9,
        dtype=jnp.dtype("float32"),
    ),
    Geometry.full(
        num_layers=1,
        rows=3,
        num_kv_heads=3,
        head_dim=16,
        page_size=16,
        pages_per_head=3,
        dtype=jnp.dtype("bfloat16"),
    ),
    Geometry.full(
        num_layers=1,
        rows=1,
        num_kv_heads=1,
        head_dim=4,
        page_size=1,
        pages_per_head=40,
        dtype=jnp.dtype("float32"),
    ),
]
TOKENS = 7


@functools.partial(jax.jit, donate_argnames="cache")
def step(cache: KVCache, k, v, count, ahead) -> KVCache:
    """Read ``count`` of the new tokens in every row, with room for ``ahead`` more."""
    offset = jnp.arange(TOKENS, dtype=jnp.int32)[None]
    positions = cache.length[:, None] + offset
    cache = reserve(cache, cache.length + count + ahead)
    layers = tuple(
        append(layer, k[i], v[i], positions, offset < count[:, None])
        for i, layer in enumerate(cache.layers)
    )
    return dataclasses.replace(cache, layers=layers, length=cache.length + count)


class Model:
    """What a cache is: for every layer, row and head the keys and values, in order."""

    def __init__(self, geometry: Geometry, seed: int):
        self.geometry, self.rng = geometry, np.random.default_rng(seed)
        self.capacity = only(geometry).capacity
        self.length = np.zeros(geometry.rows, np.int32)
        self.reserved = np.zeros(geometry.rows, np.int32)
        shape = (len(geometry.layers), geometry.rows, geometry.num_kv_heads)
        self.k = {at: [] for at in np.ndindex(shape)}
        self.v = {at: [] for at in np.ndindex(shape)}

    def draw(self):
        """Random arguments of a step that fit, and this model after it."""
        shape = self.geometry
        count = np.minimum(
            self.rng.integers(0, TOKENS + 1, shape.rows), self.capacity - self.length
        )
        count[self.rng.random(shape.rows) < 0.25] = 0
        ahead = np.minimum(self.rng.integers(0, 6, shape.rows), self.capacity - self.length - count)
        size = (len(shape.layers), shape.rows, TOKENS, shape.num_kv_heads, shape.head_dim)
        k, v = (jnp.asarray(self.rng.standard_normal(size), shape.dtype) for _ in range(2))
        for layer, row, head in self.k:
            new = slice(None, count[row])
            self.k[layer, row, head].extend(np.asarray(k)[layer, row, new, head])
            self.v[layer, row, head].extend(np.asarray(v)[layer, row, new, head])
        self.length = (self.length + count).astype(np.int32)
        self.reserved = np.maximum(self.reserved, self.length + ahead)
        return k, v, count.astype(np.int32), ahead.astype(np.int32)


def check(cache: KVCache, model: Model) -> None:
    shape = model.geometry
    np.testing.assert_array_equal(cache.length, model.length)
    owned_pages = -(-model.reserved // only(shape).page_size)
    for index, layer in enumerate(cache.layers):
        (pool,), (table,), (free,) = layer.pools, np.asarray(layer.tables), layer.free
        owned = table[table != SCRATCH_PAGE].tolist()
        unowned = np.asarray(free.pages)[: int(free.count)].tolist()
        assert sorted(owned + unowned) == list(range(1, shape.pages(only(shape)))), (
            "pages lost or shared"
        )
        k, v, bias, pos = (np.asarray(x) for x in (pool.k, pool.v, pool.bias, pool.pos))
        assert np.isfinite(k.astype(np.float32)).all() and np.isfinite(v.astype(np.float32)).all()
        assert np.isneginf(bias[[SCRATCH_PAGE, *unowned]]).all()
        for row, head in np.ndindex(table.shape[:2]):
            pages = table[row, head]
            assert (pages != SCRATCH_PAGE).tolist() == [
                i < owned_pages[row] for i in range(len(pages))
            ]
            pages = pages[: owned_pages[row]]
            live = np.argwhere(bias[pages] > -np.inf)
            assert (bias[pages][tuple(live.T)] == 0).all()
            positions = pos[pages][tuple(live.T)]
            assert sorted(positions.tolist()) == list(range(model.length[row]))
            assert (pos[pages][bias[pages] == -np.inf] == -1).all()
            for (page, slot), position in zip(live, positions, strict=True):
                at = index, row, head
                assert (k[pages[page], slot] == model.k[at][position]).all()
                assert (v[pages[page], :, slot] == model.v[at][position]).all()
    slots, pages = held(cache)
    heads = shape.num_kv_heads
    per_layer = np.ones((1, len(shape.layers), 1), int) * heads
    np.testing.assert_array_equal(slots, per_layer * model.length[:, None, None])
    np.testing.assert_array_equal(pages, per_layer * owned_pages[:, None, None])


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: f"page{only(g).page_size}")
def test_random_sequences(geometry):
    cache, model = init_cache(geometry), Model(geometry, seed=only(geometry).page_size)
    check(cache, model)
    for _ in range(16):
        cache = step(cache, *model.draw())
        check(cache, model)
    assert model.reserved.max() == model.capacity, "the sequence must reach a full cache"


def test_attention_over_the_pages_is_attention_over_the_tokens():
    geometry, group = GEOMETRIES[0], 3
    cache, model = init_cache(geometry), Model(geometry, seed=5)
    for _ in range(4):
        cache = step(cache, *model.draw())
    assert len(set(model.length.tolist())) > 2
    q = model.rng.standard_normal((geometry.rows, geometry.num_kv_heads * group, 8))
    for index, layer in enumerate(cache.layers):
        out, _ = paged_attention(jnp.asarray(q, jnp.float32), layer.pools, layer.tables, scale=0.3)
        for row, head in np.ndindex(q.shape[:2]):
            at = index, row, head // group
            weights = np.exp(np.array(model.k[at]) @ q[row, head] * 0.3)
            expected = weights @ np.array(model.v[at]) / weights.sum()
            np.testing.assert_allclose(out[row, head], expected, rtol=0, atol=1e-5)


def test_a_row_that_holds_more_than_is_asked_keeps_it():
    geometry = GEOMETRIES[0]
    cache = reserve(init_cache(geometry), jnp.array([9, 4, 0, 36], jnp.int32))
    again = reserve(cache, jnp.array([1, 0, 0, 36], jnp.int32))
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(before, after)
    slots, pages = held(again)
    assert not slots.any()
    assert pages.sum((1, 2)).tolist() == [4 * 3, 4 * 1, 0, 4 * 9]


def test_padding_and_finished_rows_leave_no_trace():
    """Whatever tokens stand where nothing is kept, the cache is the same but for scratch."""
    geometry = GEOMETRIES[0]
    model = Model(geometry, seed=1)
    k, v, count, ahead = model.draw()
    dropped = jnp.arange(TOKENS)[None] >= count[:, None]
    assert dropped.any(1).sum() > 1
    noise = jnp.where(dropped[None, :, :, None, None], 1e4, 0)
    caches = [
        step(init_cache(geometry), k + extra, v - extra, count, ahead)
        for extra in (noise, jnp.zeros_like(noise))
    ]
    for left, right in zip(*(jax.tree.leaves(cache) for cache in caches), strict=True):
        in_pool = left.ndim > 0 and left.shape[0] == geometry.pages(only(geometry))
        if in_pool:
            left, right = left[SCRATCH_PAGE + 1 :], right[SCRATCH_PAGE + 1 :]
        np.testing.assert_array_equal(left, right)
    for layer in caches[0].layers:
        assert np.isneginf(layer.pools[0].bias[SCRATCH_PAGE]).all()
        assert (layer.pools[0].pos[SCRATCH_PAGE] == -1).all()


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: f"page{only(g).page_size}")
def test_an_empty_cache_takes_the_bytes_that_were_planned(geometry):
    cache = init_cache(geometry)
    leaves = jax.tree.leaves(cache)
    assert sum(leaf.nbytes for leaf in leaves) == geometry.nbytes
    pools = jax.tree.leaves([layer.pools for layer in cache.layers])
    assert sum(leaf.nbytes for leaf in pools) == geometry.pool_bytes
    pointers = {leaf.unsafe_buffer_pointer() for leaf in leaves}
    assert len(pointers) == len(leaves), "a donated pytree may hold no buffer twice"
    slots, pages = held(cache)
    assert not slots.any() and not pages.any()


def test_slot_and_page_bytes_count_everything_that_a_slot_holds():
    geometry = GEOMETRIES[1]
    slot = 2 * 16 * 2 + 4 + 4
    assert sum(geometry.slot_bytes(only(geometry)).values()) == slot
    assert geometry.page_bytes == ((16 * slot + 4,),)


def test_usage_counts_every_buffer_once():
    cache = init_cache(GEOMETRIES[0])
    found = cache.usage()
    assert sum(found.values()) == cache.nbytes() == GEOMETRIES[0].nbytes
    shape = only(GEOMETRIES[0])
    slots = 2 * GEOMETRIES[0].pages(shape) * shape.page_size
    assert (found["codes"], found["biases"], found["recent"]) == (slots * 16 * 4, slots * 4, 0)
    assert found["tables"] == GEOMETRIES[0].nbytes - GEOMETRIES[0].pool_bytes
