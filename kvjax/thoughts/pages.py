"""Thoughts and the pages of one layer: sparsity of the last token, and what of a segment stays."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.cache import LayerCache, query_positions
from kvjax.cache.slots import evict, replace_class
from kvjax.compress.attention import group_attention
from kvjax.compress.context import Context
from kvjax.dynakv.cached import held_keys
from kvjax.matching import AttentionMatching
from kvjax.models.config import ModelConfig
from kvjax.sharding.across import gathered
from kvjax.thoughts.inherit import inherit
from kvjax.thoughts.latents import segment_levels
from kvjax.thoughts.retention import Retention, survivals
from kvjax.thoughts.sparsity import NEGLIGIBLE
from kvjax.thoughts.state import Thoughts
from pallas_kernels.einsum import einsum_float32
from pallas_kernels.read import plain_slot_keys, slot_products


def last_sparsity(
    layer: LayerCache,
    scale: float,
    length: Int[Array, " B"],
    corrected: bool,
    config: ModelConfig | None = None,
) -> Float[Array, " B"]:
    """Share of the tokens that each row's last token hardly attends to.

    ThinKV, appendix C.2: of every KV group the largest logit of its query heads, softmax over the
    keys, mean over the groups; then the weights below 1 % of the largest are counted. A token that
    only some KV heads hold has a weight of zero in the others.

    Args:
        layer: of a layer that keeps queries.
        length: tokens read; the last one's query is looked at.
        corrected: whether evicted tokens count, as tokens with too small a weight.
        config: the model's, where latents are rebuilt.
    """
    rows, count = layer.queries.shape[:2]
    last = jnp.maximum(length - 1, 0) % count
    q = jnp.take_along_axis(layer.queries, last[:, None, None, None], 1)[:, 0]
    q = q.astype(jnp.float32)
    logits, pos = [], []
    for c in range(len(layer.pools)):
        dots, bias, at = _products(layer, c, q, config)
        live = (bias > -jnp.inf) & (at >= 0)
        logits.append(jnp.where(live, dots.max(2) * scale + bias, -jnp.inf))
        pos.append(jnp.where(live, at, jnp.iinfo(jnp.int32).max))
    logit, where = (gathered(jnp.concatenate(x, -1), axis=1) for x in (logits, pos))
    top = logit.max(-1, keepdims=True)
    weight = jnp.exp(logit - jnp.where(top > -jnp.inf, top, 0))
    weight /= jnp.maximum(weight.sum(-1, keepdims=True), 1e-30) * logit.shape[1]
    return _share_below(weight.reshape(rows, -1), where.reshape(rows, -1), length, corrected)


def _products(layer: LayerCache, c: int, q: Float[Array, "B Hq D"], config: ModelConfig | None):
    """Products of queries with a class's keys [B, Hkv, G, S], biases and positions of its slots."""
    if layer.coder is not None:
        k, at = held_keys(layer, c, config)
        at = jnp.broadcast_to(at[:, None], k.shape[:3])
        grouped = q.reshape(len(q), k.shape[1], -1, q.shape[2])
        dots = einsum_float32("bhgd,bhsd->bhgs", grouped, k)
        return dots, jnp.zeros(at.shape, jnp.float32), at
    pool, table = layer.pools[c], layer.tables[c]
    bias, pos = (x[table].reshape(*table.shape[:2], -1) for x in (pool.bias, pool.pos))
    return slot_products(pool, table, q), bias, pos


def _share_below(
    weight: Float[Array, "B N"], pos: Int[Array, "B N"], length: Int[Array, " B"], corrected: bool
) -> Float[Array, " B"]:
    """Add up what the heads say of each token, and count the small sums."""
    order = pos.argsort(-1)
    pos, weight = (jnp.take_along_axis(x, order, -1) for x in (pos, weight))
    first = pos != jnp.pad(pos, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    token = jnp.cumsum(first, -1, dtype=jnp.int32) - 1
    row = jnp.arange(len(pos), dtype=jnp.int32)[:, None]
    whole = jnp.zeros_like(weight).at[row, token].add(weight)
    real = jnp.zeros_like(first).at[row, token].max(pos < jnp.iinfo(jnp.int32).max)
    small = real & (whole < NEGLIGIBLE * whole.max(-1, keepdims=True))
    below, there = (mask.sum(-1).astype(jnp.float32) for mask in (small, real))
    if corrected:
        seen = length.astype(jnp.float32)
        return (below + seen - there) / jnp.maximum(seen, 1)
    return below / jnp.maximum(there, 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """Where the segments of every row are.

    Attributes:
        prompt: where the first one begins.
        closes: the segment that has become complete, -1 in rows where none has.
        every: tokens of a segment.
    """

    prompt: Int[Array, " B"]
    closes: Int[Array, " B"]
    every: int = dataclasses.field(metadata={"static": True})

    def of(self, pos: Int[Array, "B ..."]) -> Int[Array, "B ..."]:
        """The segment of a position; of the prompt's, what is below zero."""
        prompt = self.prompt.reshape(-1, *(1,) * (pos.ndim - 1))
        return (pos - prompt) // self.every


def settle_levels(
    layer: LayerCache,
    index: Int[Array, ""],
    retention: Retention,
    segments: Segments,
    scale: float,
    length: Int[Array, " B"],
    seed: Int[Array, ""],
    config: ModelConfig | None = None,
) -> LayerCache:
    """Find out for every token of the segments that close how many demotions it survives.

    Args:
        config: the model's, where latents are rebuilt.
    """
    start = segments.prompt + segments.closes * segments.every
    offset = jnp.arange(segments.every, dtype=jnp.int32)[None]
    pos = start[:, None] + offset  # [B, T]
    closes = segments.closes >= 0
    if layer.coder is not None:

        def asked(keys):
            return _asked(layer, keys, pos, scale, length)

        own = jnp.where(closes[:, None], pos, -1)
        return segment_levels(layer, config, index, retention, own, asked, seed)
    keys, places = None, {}
    for c, pool in enumerate(layer.pools):
        if pool.level is None:
            continue
        pages, slots, there = _places(layer, c, start, segments.every, closes)
        places[c] = pages, slots, there
        own = plain_slot_keys(pool, pages, slots, jnp.float32)
        keys = own if keys is None else jnp.where(there[..., None], own, keys)
    levels = survivals(retention, keys, _asked(layer, keys, pos, scale, length), pos, seed, index)
    for c, (pages, slots, there) in places.items():
        pool = layer.pools[c]
        # What is not there is beyond the last page.
        at = jnp.where(there, pages, len(pool.level))
        level = pool.level.at[at, slots].set(levels.astype(jnp.uint8), mode="drop")
        layer = replace_class(layer, c, pools=dataclasses.replace(pool, level=level))
    return layer


def survivors(
    layer: LayerCache, thoughts: Thoughts, segments: Segments
) -> list[Bool[Array, "B Hkv _ page"]]:
    """The slots of every class that survive the level of their segment."""
    found = []
    for pool, table in zip(layer.pools, layer.tables, strict=True):
        if pool.level is None:
            found.append(jnp.ones((*table.shape, pool.page_size), bool))
            continue
        segment = segments.of(pool.pos[table])
        at = jnp.clip(segment, 0, thoughts.level.shape[1] - 1).reshape(len(table), -1)
        level = jnp.take_along_axis(thoughts.level, at, 1).reshape(segment.shape)
        found.append((segment < 0) | (pool.level[table].astype(jnp.int32) >= level))
    return found


def retire(
    layer: LayerCache,
    thoughts: Thoughts,
    segments: Segments,
    retention: Retention,
    compactor: AttentionMatching | None = None,
    scale: float = 1.0,
    length: Int[Array, " B"] | None = None,
    due: Bool[Array, " B"] | None = None,
) -> LayerCache:
    """Evict the tokens that do not survive the level of their segment.

    Args:
        compactor: what lets survivors take over from those that go; with ``scale``, the factor of
            attention logits, and ``length``, the tokens read.
        due: rows to do this in; all if None.
    """
    kept = survivors(layer, thoughts, segments)
    if due is not None:
        kept = [mask | ~due[:, None, None, None] for mask in kept]
    if compactor is not None:
        segment = [
            segments.of(pool.pos[t]) for pool, t in zip(layer.pools, layer.tables, strict=True)
        ]
        count = thoughts.level.shape[1]
        layer = inherit(layer, kept, segment, count, compactor, scale, length)
    for c, pool in enumerate(layer.pools):
        if pool.level is not None:
            layer = evict(layer, c, kept[c], forget=retention.forget)
    return layer


def _places(layer, c, start, every: int, closes: Bool[Array, " B"]):
    """Page and slot of each token of a segment in one class, and whether it is there."""
    pool, table = layer.pools[c], layer.tables[c]
    rows, heads = table.shape[:2]
    offset = pool.pos[table] - start[:, None, None, None]
    mine = (pool.bias[table] > -jnp.inf) & (offset >= 0) & (offset < every)
    mine = (mine & closes[:, None, None, None]).reshape(rows, heads, -1)
    offset = jnp.where(mine, offset.reshape(mine.shape), every)
    slot = jnp.broadcast_to(jnp.arange(mine.shape[2], dtype=jnp.int32), mine.shape)
    row, head = (jnp.arange(n, dtype=jnp.int32) for n in (rows, heads))
    none = jnp.full((rows, heads, every), -1, jnp.int32)
    found = none.at[row[:, None, None], head[None, :, None], offset].set(slot, mode="drop")
    there = found >= 0
    found = jnp.maximum(found, 0)
    pages = jnp.take_along_axis(table, found // pool.page_size, 2)
    return pages, found % pool.page_size, there


def _asked(layer: LayerCache, keys, pos, scale: float, length):
    """What the last queries attend to within the segment, where they are kept."""
    if layer.queries is None:
        return None
    shape = keys.shape[:3]
    ctx = Context(
        bias=jnp.zeros(shape, jnp.float32),
        pos=jnp.broadcast_to(pos[:, None], shape),
        length=length,
        prompt=length,
        seed=jnp.int32(0),
        k=keys,
        queries=layer.queries,
        query_pos=query_positions(layer, length),
        scale=scale,
    )
    return group_attention(ctx, layer.queries.shape[1]).sum(2)
