"""Where tokens go: slots in pages, and the stores into them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from kvjax.cache.cache import KVCache, LayerCache
from kvjax.cache.pages import give_pages, take_pages
from kvjax.codecs import KeyBasis, KVCodec, code_keys, code_values, plain_keys
from pallas_kernels import SCRATCH_PAGE, KVPages, write_slots
from pallas_kernels.layout import SLOT_AXIS

_FEW = 64  # tokens that leave the recent window at a time


def replace_class(layer: LayerCache, index: int, **parts) -> LayerCache:
    """The layer with another pool, table or free list for one class."""
    changed = {}
    for name, new in parts.items():
        held = getattr(layer, name)
        changed[name] = (*held[:index], new, *held[index + 1 :])
    return dataclasses.replace(layer, **changed)


def reserve(cache: KVCache, length: Int[Array, " B"]) -> KVCache:
    """Give every row the pages of the first class that it needs to hold ``length`` tokens.

    Done once for many steps, so that a step itself never touches a free list. The planner sizes
    the pools so that the pages are there. A class that is full takes no more: its oldest tokens
    give way.
    """
    layers = tuple(reserve_layer(layer, length) for layer in cache.layers)
    return dataclasses.replace(cache, layers=layers)


def reserve_layer(layer: LayerCache, length: Int[Array, " B"]) -> LayerCache:
    pool, table = layer.pools[0], layer.tables[0]
    needed = jnp.minimum(-(-length // pool.page_size), table.shape[2])
    owned = (table != SCRATCH_PAGE).sum(-1, dtype=jnp.int32)
    table, free = take_pages(layer.free[0], table, jnp.maximum(needed[:, None] - owned, 0))
    return replace_class(layer, 0, tables=table, free=free)


def append(
    layer: LayerCache,
    k: Float[Array, "B T Hkv D"],
    v: Float[Array, "B T Hkv Dv"],
    pos: Int[Array, "B T"],
    keep: Bool[Array, "B T"],
    mass: Float[Array, "B Hkv T"] | None = None,
) -> LayerCache:
    """Store tokens in the first class, at the slots of their positions, reserved already.

    Tokens that are not to be kept (padding, finished rows) go to the scratch page. Of those to be
    kept, no two may be a multiple of the capacity apart.
    """
    pool, table = layer.pools[0], layer.tables[0]
    page = pos // pool.page_size % table.shape[2]
    pages = jnp.take_along_axis(table, page[:, None], 2, mode="clip")
    pages = jnp.where(keep[:, None], pages, SCRATCH_PAGE)  # [B, Hkv, T]
    slots = jnp.broadcast_to((pos % pool.page_size)[:, None], pages.shape)
    k, v = (x.swapaxes(1, 2).astype(pool.k.dtype) for x in (k, v))
    return replace_class(layer, 0, pools=write_slots(pool, pages, slots, k, v, pos, mass=mass))


def store(
    layer: LayerCache,
    index: int,
    k: Float[Array, "B Hkv T D"],
    v: Float[Array, "B Hkv T Dv"],
    pos: Int[Array, "B T"],
    keep: Bool[Array, "B Hkv T"],
    mass: Float[Array, "B Hkv T"] | None = None,
    bias: Float[Array, "B Hkv T"] | None = None,
) -> tuple[LayerCache, Bool[Array, "B Hkv T"]]:
    """Code tokens and put them into free slots of a class: of pages owned, then of new ones.

    Args:
        index: the class.
        k: keys as the model made them.
        v: values.
        pos: logical positions.
        keep: which tokens each KV head keeps; the others may hold anything. Where slots share
            scales, T is a multiple of the group, and groups are kept in whole but for the last.
        mass: attention that they have received so far.
        bias: log-mass of those that stand for more or less than themselves.

    Returns:
        The layer, and which of the tokens found a slot.
    """
    pool, codec = layer.pools[index], layer.codecs[index]
    table, free = layer.tables[index], layer.free[index]
    needed = keep.sum(-1, dtype=jnp.int32)
    lacking = needed - _is_free(pool, table, codec.group).sum((2, 3), dtype=jnp.int32)
    wanted = jnp.maximum(-(-lacking // pool.page_size), 0)
    if layer.coder is not None:
        wanted = _of_own_share(layer.share, table, wanted)
    table, free = take_pages(free, table, wanted)
    pages, slots = _free_slots(pool, table, keep, codec.group)
    shared = {}
    if not pool.uniform:
        k, v, shared = _encode(codec, k, v, keep)
    pool = write_slots(pool, pages, slots, k, v, pos, **shared, mass=mass)
    placed = keep & (pages != SCRATCH_PAGE)
    if bias is not None:
        own = pool.bias.at[pages, slots].set(jnp.where(placed, bias, -jnp.inf))
        pool = dataclasses.replace(pool, bias=own)
    return replace_class(layer, index, pools=pool, tables=table, free=free), placed


def evict(
    layer: LayerCache, index: int, keep: Bool[Array, "B Hkv P page"], *, forget: bool = True
) -> LayerCache:
    """Free the slots of a class that are not to be kept, and give back the pages left empty.

    The pages of the first class stay: a row needs them again with its next token.

    Args:
        forget: False leaves the bias of a freed slot, so that it is still attended until it is
            used again or its page is given back (an ablation).
    """
    pool, table, free = layer.pools[index], layer.tables[index], layer.free[index]
    live = keep & (pool.pos[table] >= 0)
    attended = live if forget else jnp.broadcast_to(live.any(-1, keepdims=True), live.shape)
    if pool.bias is not None:
        bias = pool.bias.at[table].set(jnp.where(attended, pool.bias[table], -jnp.inf))
        pool = dataclasses.replace(pool, bias=bias)
    left = pool.pos.at[table].set(jnp.where(live, pool.pos[table], -1))
    pool = dataclasses.replace(pool, pos=left)
    if index:
        table, free = give_pages(free, table, ~live.any(-1))
    return replace_class(layer, index, pools=pool, tables=table, free=free)


def revalue(
    layer: LayerCache,
    index: int,
    pages: Int[Array, "B Hkv T"],
    slots: Int[Array, "B Hkv T"],
    v: Float[Array, "B Hkv T D"] | None,
    bias: Float[Array, "B Hkv T"],
) -> LayerCache:
    """Give tokens of a class other values and biases, in place; their keys stay as they are.

    Args:
        index: the class, none whose tokens share scales.
        pages: where they are; the scratch page for what is no token.
        slots: the slot in the page.
        v: values as the model knows them; None: they stay as they are.
        bias: log-mass.
    """
    pool, codec = layer.pools[index], layer.codecs[index]
    there = pages != SCRATCH_PAGE
    stored = {"bias": pool.bias.at[pages, slots].set(jnp.where(there, bias, -jnp.inf))}
    parts = {}
    if v is not None:
        v = jnp.where(there[..., None], v, 0)
        if codec.rotate:
            v = code_values(codec, v)
        coded = codec.v.encode(v)
        parts = {"v": coded.codes, "v_scale": coded.scale, "v_zero": coded.zero}
    for name, new in parts.items():
        if new is not None:
            channel = jnp.arange(new.shape[-1], dtype=jnp.int32)
            at = getattr(pool, name).at[pages[..., None], channel, slots[..., None]]
            stored[name] = at.set(new.astype(getattr(pool, name).dtype))
    return replace_class(layer, index, pools=dataclasses.replace(pool, **stored))


def as_stored(
    layer: LayerCache, index: int, k: Float[Array, "B Hkv T D"]
) -> Float32[Array, "B Hkv T D"]:
    """Keys as they would be read once a class had stored them."""
    pool, codec = layer.pools[index], layer.codecs[index]
    basis = KeyBasis(pool.mean, pool.balance)
    coded = codec.k.encode(code_keys(codec, basis, k))
    return plain_keys(codec, basis, codec.k.decode(coded))


def compact(layer: LayerCache, index: int, due: Bool[Array, " B"] | None = None) -> LayerCache:
    """Move the live slots of each KV head to its first pages, byte for byte; free the rest.

    For once, after much was evicted: it copies all that the class's tables name.

    Args:
        due: rows to do this in; all if None.

    Raises:
        ValueError: slots of the class share scales, which cannot move with one of them.
    """
    pool, table, free = layer.pools[index], layer.tables[index], layer.free[index]
    if layer.codecs[index].group > 1:
        raise ValueError(f"slots of {layer.codecs[index].name} share scales and cannot be moved")
    rows, heads, width = table.shape
    free_slots = pool.bias[table].reshape(rows, heads, -1) == -jnp.inf
    if due is not None:  # where none is free, none moves
        free_slots &= due[:, None, None]
    order = jnp.argsort(free_slots, -1, stable=True)

    def move(array, axis):
        """Reorder the slots, which lie along ``axis`` of the pool's array."""
        if array is None:
            return None
        lying = jnp.moveaxis(array, axis, 1)  # [pages, page, ...]
        rest = lying.shape[2:]
        flat = lying[table].reshape(rows, heads, width * pool.page_size, *rest)
        at = order.reshape(*order.shape, *(1,) * len(rest))
        sorted_ = jnp.take_along_axis(flat, at, 2).reshape(*table.shape, pool.page_size, *rest)
        # The scratch page, which pads the tables, comes out as it was: nothing in it is live.
        return array.at[table].set(jnp.moveaxis(sorted_, 3, 2 + axis))

    pool = dataclasses.replace(
        pool, **{name: move(getattr(pool, name), axis) for name, axis in SLOT_AXIS.items()}
    )
    empty = ~(pool.bias[table] > -jnp.inf).any(-1)
    if due is not None:
        empty &= due[:, None, None]
    table, free = give_pages(free, table, empty)
    return replace_class(layer, index, pools=pool, tables=table, free=free)


def _of_own_share(
    share: int, table: Int[Array, "B N P"], wanted: Int[Array, "B N"]
) -> Int[Array, "B N"]:
    """Pages that a row may take for the blocks of its latents, out of its own share of the pool.

    First blocks of keys and values have room for every token, so that none is lost. What is left of
    the share goes to the others, first blocks first; rows never feel each other.
    """
    lines, most = table.shape[1:]
    deep = jnp.arange(lines, dtype=jnp.int32)[None] >= 2
    owned = jnp.where(deep, (table != SCRATCH_PAGE).sum(-1, dtype=jnp.int32), 0).sum(-1)
    left = share - 2 * most - owned
    before = jnp.cumsum(jnp.where(deep, wanted, 0), -1) - jnp.where(deep, wanted, 0)
    return jnp.where(deep, jnp.clip(left[:, None] - before, 0, wanted), wanted)


def _is_free(
    pool: KVPages, table: Int[Array, "B Hkv P"], group: int
) -> Bool[Array, "B Hkv P page"]:
    """Slots to be used: those that share a scale are free together or not at all."""
    free = (pool.pos[table] < 0) & (table != SCRATCH_PAGE)[..., None]
    if group == 1:
        return free
    groups = free.reshape(*table.shape, -1, group)
    return jnp.broadcast_to(groups.all(-1, keepdims=True), groups.shape).reshape(free.shape)


def _free_slots(
    pool: KVPages, table: Int[Array, "B Hkv P"], keep: Bool[Array, "B Hkv T"], group: int
) -> tuple[Int[Array, "B Hkv T"], Int[Array, "B Hkv T"]]:
    """Page and slot for every token to be kept; the scratch page where there is none left."""
    rows, heads, _ = keep.shape
    free = _is_free(pool, table, group).reshape(rows, heads, -1)
    upto = jnp.cumsum(free, -1, dtype=jnp.int32)
    mine = jnp.cumsum(keep, -1, dtype=jnp.int32)
    # The first slot by which as many are free; beyond the last one, a page that is not there.
    none = free.shape[-1]
    # On a GPU to compare with all is one launch, to search many; of a prompt there are too many.
    method = "compare_all" if keep.shape[-1] <= _FEW else "scan"
    find = jax.vmap(jax.vmap(functools.partial(jnp.searchsorted, method=method)))
    place = jnp.where(keep, find(upto, mine).astype(jnp.int32), none)
    pages = jnp.take_along_axis(table, place // pool.page_size, 2, mode="clip")
    return jnp.where(place < none, pages, SCRATCH_PAGE), place % pool.page_size


def _encode(codec: KVCodec, k, v, keep) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Codes, and the scales and zero points that tokens or channels share."""
    k, v = (
        part.encode(jnp.where(keep[..., None], x, 0)) for part, x in ((codec.k, k), (codec.v, v))
    )
    shared = {"k_scale": k.scale, "v_scale": v.scale, "k_zero": k.zero, "v_zero": v.zero}
    return k.codes, v.codes, shared
