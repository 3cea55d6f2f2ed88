"""The cache pytree, how it is made and what it holds."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.geometry import ClassGeometry, Geometry, LayerGeometry
from kvjax.cache.ledger import Ledger, empty_ledger
from kvjax.codecs import Codec, KeyBasis, KVCodec, kv_codec
from kvjax.dynakv.coder import Coder
from kvjax.dynakv.spectrum import blank_layer
from kvjax.thoughts.state import Thoughts, no_thoughts
from pallas_kernels import SCRATCH_PAGE, KVPages
from pallas_kernels.layout import UNKNOWN_LEVEL


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FreeList:
    """A stack of the pages that nobody owns.

    Attributes:
        pages: page ids; only the first ``count`` are free.
        count: how many are. Where devices share the heads, each has a stack of its own, and an
            array that all of them have holds one number for each.
    """

    pages: Int[Array, " free_pages"]
    count: Int[Array, "*devices"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """What one layer holds: for each codec class a pool, its block tables and its free list.

    The first class takes new tokens as the model makes them, at the slot of their logical position
    modulo the class's capacity. If there are more classes, it holds the most recent tokens alone.

    A table entry is the page of that row and KV head, ``SCRATCH_PAGE`` where there is none; those
    come last.

    Attributes:
        queries: the last queries, a token's at its position modulo their number.
        coder: where latents are kept instead of keys and values, what makes and rebuilds them.
            Tables then have a line for each block of them (``pallas_kernels.latent_attention``)
            instead of each KV head, which ``Hkv`` stands for here and in what works on tables.
        span: positions are below this, where there are latents.
        share: pages of theirs that a row may own.
    """

    pools: tuple[KVPages, ...]
    tables: tuple[Int[Array, "B _ _"], ...]
    free: tuple[FreeList, ...]
    queries: Float[Array, "B N Hq D"] | None = None
    coder: Coder | None = None
    codecs: tuple[KVCodec, ...] = dataclasses.field(
        default=(kv_codec("bf16"),), metadata={"static": True}
    )
    span: int = dataclasses.field(default=0, metadata={"static": True})
    share: int = dataclasses.field(default=0, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The whole cache; donated to, and returned by, every program that changes it.

    Three numbers are never confused: ``length``, the logical position of a row's next token, which
    only grows; the live slots, those with ``bias > -inf``; and the slot where the next token goes.

    Attributes:
        layers: one ``LayerCache`` a layer, never stacked: a scan over stacked ones would copy them.
        length: tokens read so far in each row.
        prompt: how many of them were the prompt's.
        stored: the position from which on a row's tokens are still in the first class, where there
            are others.
        crowded: tokens (of one layer and KV head each) that found no slot in their own class.
        thoughts: what is known of the rows' thoughts, where they are told apart.
        ledger: the rows' text, where something looks at it again.
    """

    layers: tuple[LayerCache, ...]
    length: Int[Array, " B"]
    prompt: Int[Array, " B"]
    stored: Int[Array, " B"]
    crowded: Int[Array, " B"]
    thoughts: Thoughts | None = None
    ledger: Ledger | None = None

    def nbytes(self) -> int:
        """Bytes of every buffer."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def usage(self) -> dict[str, int]:
        """Bytes of the buffers, by what they hold.

        "recent" is the first class where there are others; its biases and positions are with the
        others'.
        """
        found = dict.fromkeys(
            ("codes", "recent", "scales", "biases", "positions", "mass", "levels", "tables",
             "queries", "constants"), 0
        )  # fmt: skip
        kinds = {
            "bias": "biases", "pos": "positions", "mass": "mass", "level": "levels",
            "mean": "constants", "balance": "constants", "k_scale": "scales", "v_scale": "scales",
            "k_zero": "scales", "v_zero": "scales",
        }  # fmt: skip
        for layer in self.layers:
            for index, pool in enumerate(layer.pools):
                own = "recent" if index == 0 and len(layer.pools) > 1 else "codes"
                for name, kind in {"k": own, "v": own, **kinds}.items():
                    array = getattr(pool, name)
                    found[kind] += 0 if array is None else array.nbytes
            found["constants"] += sum(leaf.nbytes for leaf in jax.tree.leaves(layer.coder))
            found["queries"] += 0 if layer.queries is None else layer.queries.nbytes
        found["tables"] = self.nbytes() - sum(found.values())
        return found


def init_cache(
    geometry: Geometry,
    bases: Sequence[KeyBasis | None] | None = None,
    coders: Sequence[Coder] | None = None,
) -> KVCache:
    """An empty cache, with every buffer its own (a donated pytree may hold none twice).

    Free slots are zero, not unset: an attention weight of zero must not meet a NaN.

    Args:
        geometry: the shapes.
        bases: each layer's key mean and balance, for codecs that use them; neutral if None.
        coders: what makes and rebuilds each layer's latents, where there are any; if None, what
            leaves keys and values as they are.
    """
    bases = bases or (None,) * len(geometry.layers)
    if geometry.projector is None:
        coders = (None,) * len(geometry.layers)
    elif coders is None:
        settings = geometry.projector.in_blocks(geometry.width)
        blank = [blank_layer(geometry.width, settings, n) for n in range(len(geometry.layers))]
        coders = [Coder.of(layer, geometry.dtype) for layer in blank]
    layers = tuple(
        _init_layer(geometry, layer, basis, own)
        for layer, basis, own in zip(geometry.layers, bases, coders, strict=True)
    )
    zero = (jnp.zeros(geometry.rows, jnp.int32) for _ in range(4))
    thoughts = no_thoughts(geometry.rows, geometry.segments) if geometry.segments else None
    ledger = None
    if geometry.noted:
        ledger = empty_ledger(geometry.rows, geometry.noted, geometry.vocab_size)
    return KVCache(layers, *zero, thoughts, ledger)


def _init_layer(
    geometry: Geometry, layer: LayerGeometry, basis: KeyBasis | None, coder: Coder | None
) -> LayerCache:
    tables, free = [], []
    for shape in layer.classes:
        size = (geometry.rows, geometry.heads(shape), shape.pages_per_head)
        tables.append(jnp.full(size, SCRATCH_PAGE, jnp.int32))
        pages = geometry.pages(shape)
        # Popped from the end, so the lowest ids go first.
        stack = jnp.arange(pages - 1, 0, -1, dtype=jnp.int32)
        free.append(FreeList(stack, jnp.asarray(pages - 1, jnp.int32)))
    size = (geometry.rows, layer.queries, geometry.num_heads, geometry.head_dim)
    return LayerCache(
        pools=tuple(_init_pool(geometry, shape, basis) for shape in layer.classes),
        tables=tuple(tables),
        free=tuple(free),
        queries=jnp.zeros(size, geometry.dtype) if layer.queries else None,
        coder=coder,
        codecs=tuple(shape.codec for shape in layer.classes),
        span=geometry.span,
        share=(layer.classes[-1].pages_per_row or 0) if coder is not None else 0,
    )


def _init_pool(geometry: Geometry, shape: ClassGeometry, basis: KeyBasis | None) -> KVPages:
    pages, page, codec = geometry.pages(shape), shape.page_size, shape.codec
    of_keys, of_values = geometry.channels(shape)

    def codes(part: Codec, dim: int):
        width = part.width(dim)
        return jnp.zeros((pages, page, width), geometry.dtype if part.fmt == "float" else jnp.uint8)

    def scales(part: Codec, dim: int, wanted: bool = True):
        if part.fmt == "float" or not wanted:
            return None
        size = (pages, page // part.tokens, dim // (part.channels or dim))
        return jnp.zeros(size, part.scale_dtype)

    def turned(array):
        return None if array is None else array.swapaxes(1, 2)

    def constant(name, neutral, wanted: bool):
        own = None if basis is None else getattr(basis, name)
        if not wanted:
            return None
        size = (geometry.num_kv_heads, of_keys)
        return jnp.full(size, neutral, jnp.float32) if own is None else own + jnp.float32(0)

    return KVPages(
        k=codes(codec.k, of_keys),
        v=turned(codes(codec.v, of_values)),
        bias=None if shape.latent else jnp.full((pages, page), -jnp.inf, jnp.float32),
        pos=jnp.full((pages, page), -1, jnp.int32),
        k_scale=scales(codec.k, of_keys),
        v_scale=turned(scales(codec.v, of_values)),
        k_zero=scales(codec.k, of_keys, codec.k.zero),
        v_zero=turned(scales(codec.v, of_values, codec.v.zero)),
        mean=constant("mean", 0.0, codec.center),
        balance=constant("balance", 1.0, codec.balance),
        mass=jnp.zeros((pages, page), jnp.float32) if shape.mass else None,
        level=jnp.full((pages, page), UNKNOWN_LEVEL, jnp.uint8) if shape.levels else None,
        k_format=codec.k.fmt,
        v_format=codec.v.fmt,
        rotated=codec.rotate,
    )


def query_positions(layer: LayerCache, length: Int[Array, " B"]) -> Int[Array, "B N"]:
    """Positions of the queries that a layer keeps, -1 where there has been none."""
    count = layer.queries.shape[1]
    slot = jnp.arange(count, dtype=jnp.int32)[None]
    last = length[:, None] - 1
    return jnp.maximum(last - (last - slot) % count, -1)


def held_latents(cache: KVCache) -> Int[Array, "B L 4"] | None:
    """What every row holds in each layer, where there are latents; None elsewhere.

    Returns:
        Tokens; those of them that are no longer recent; and components stored of those, of keys and
        of values.
    """
    if cache.layers[0].coder is None:
        return None

    def of_layer(layer: LayerCache):
        recent, stored = (
            (pool.pos[table] >= 0).sum((2, 3), dtype=jnp.int32)
            for pool, table in zip(layer.pools, layer.tables, strict=True)
        )
        tokens = jnp.stack([recent[:, 0] + stored[:, 0], stored[:, 0]], 1)
        blocks = stored.reshape(len(stored), -1, 2).sum(1, dtype=jnp.int32)
        return jnp.concatenate([tokens, blocks * layer.pools[1].components], 1)

    return jnp.stack([of_layer(layer) for layer in cache.layers], 1)


def held_blocks(cache: KVCache) -> Int[Array, "B 3 L"] | None:
    """What every row holds of each position, where there are latents; None elsewhere.

    Returns:
        Layers that hold the token and count it as recent no longer; and blocks of its keys, and of
        its values, in these layers together.
    """
    if cache.layers[0].coder is None:
        return None
    rows, span = len(cache.length), cache.layers[0].span
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    counts = jnp.zeros((rows, 3, span), jnp.int32)
    for layer in cache.layers:
        pool, table = layer.pools[1], layer.tables[1]
        pos = pool.pos[table].reshape(rows, table.shape[1], -1)
        side = jnp.arange(table.shape[1], dtype=jnp.int32) % 2 + 1
        # Every token has the first block of its keys, which says as well that it is there.
        place = jnp.concatenate([pos[:, 0], pos.reshape(rows, -1)], 1)
        what = jnp.repeat(jnp.pad(side, (1, 0)), pos.shape[2])[None]
        at = row, what, jnp.where(place < 0, span, place)
        counts = counts.at[at].add(1, mode="drop")
    return counts


def held(cache: KVCache) -> tuple[Int[Array, "B L C"], Int[Array, "B L C"]]:
    """Live slots and owned pages of every row, over all KV heads, for every layer and class.

    Layers with fewer classes than others have zeros at the end.
    """
    most = max(len(layer.pools) for layer in cache.layers)
    slots, pages = [], []
    for layer in cache.layers:
        rest = [jnp.zeros(cache.length.shape, jnp.int32)] * (most - len(layer.pools))
        live = [
            (pool.pos[table] >= 0).sum((1, 2, 3), dtype=jnp.int32)
            for pool, table in zip(layer.pools, layer.tables, strict=True)
        ]
        owned = [(table != SCRATCH_PAGE).sum((1, 2), dtype=jnp.int32) for table in layer.tables]
        slots.append(jnp.stack(live + rest, -1))
        pages.append(jnp.stack(owned + rest, -1))
    return jnp.stack(slots, 1), jnp.stack(pages, 1)
