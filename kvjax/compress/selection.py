"""Which tokens of a layer stay, and what of them changes when others go."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.cache import LayerCache, query_positions
from kvjax.compress.context import Context
from kvjax.compress.keep import keep_mask, protected
from kvjax.compress.refit import Change, keys_to_store, match, read_classes
from kvjax.recipes import Recipe
from kvjax.sharding.across import own
from pallas_kernels.read import plain_keys, plain_values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Where each row stands.

    Attributes:
        before: logical length when the first class was last written in whole: what came since is
            ``Incoming``, if anything is.
        length: logical length now.
        prompt: the prompt's length, as far as it has been read.
        stored: positions below have left the recent window already.
        leaving: positions below leave it now.
        select: rows whose tokens are selected; the others keep all.
        seed: of selectors that draw.
        segment: of every position, where the selector looks for paragraphs.
    """

    before: Int[Array, " B"]
    length: Int[Array, " B"]
    prompt: Int[Array, " B"]
    stored: Int[Array, " B"]
    leaving: Int[Array, " B"]
    select: Bool[Array, " B"]
    seed: Int[Array, ""]
    segment: Int[Array, "B L"] | None = None


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Tokens that are not stored yet, or not for good.

    Attributes:
        keep: where there is one.
        into: the class that it goes to.
        leaves: whether it leaves the recent window now.
    """

    pos: Int[Array, "B M"]
    k: Float[Array, "B Hkv M D"]
    v: Float[Array, "B Hkv M D"]
    keep: Bool[Array, "B Hkv M"]
    mass: Float[Array, "B Hkv M"] | None
    into: Int[Array, "B M"]
    leaves: Bool[Array, "B M"]


def in_window(layer: LayerCache, rows: Rows, window: int, pos, keep):
    """Masks of what the layer's sliding window can still see: of each class, and of new tokens.

    New ones that share scales are stored in whole groups, where only some of them can be seen too.
    """
    first = (rows.length - window + 1)[:, None]
    kept = [
        pool.pos[table] >= first[..., None, None]
        for pool, table in zip(layer.pools[1:], layer.tables[1:], strict=True)
    ]
    together = max(codec.group for codec in layer.codecs)
    stored = rows.stored[:, None]  # where the first group of new tokens begins
    first = stored + jnp.maximum(first - stored, 0) // together * together
    return kept, keep & (pos >= first)[:, None]


def selection(
    layer: LayerCache,
    index,
    recipe: Recipe,
    scale: float,
    rows: Rows,
    new: Candidates,
    budgets: tuple[int, ...] | None = None,
    asked: Float[Array, "B N Hq D"] | None = None,
) -> tuple[list[Bool[Array, "B Hkv _ page"]], Bool[Array, "B Hkv M"], Change | None]:
    """What stays, of each class and of the candidates; and what changes of it.

    Args:
        budgets: tokens of each KV head, where they are not alike.
        asked: queries that see all there is, instead of the last ones.
    """
    pools, tables = layer.pools[1:], layer.tables[1:]
    shapes = [(*table.shape, pool.page_size) for pool, table in zip(pools, tables, strict=True)]

    def joined(name, last):
        parts = [getattr(pool, name)[table] for pool, table in zip(pools, tables, strict=True)]
        return jnp.concatenate([*(part.reshape(*last.shape[:2], -1) for part in parts), last], -1)

    bias = joined("bias", jnp.where(new.keep, 0.0, -jnp.inf))
    pos = joined("pos", jnp.broadcast_to(new.pos[:, None], new.keep.shape))
    live = bias > -jnp.inf
    selector, matches = recipe.selector, recipe.compactor is not None
    fits = matches and recipe.compactor.needs_values
    reads = matches or selector.needs_keys or selector.needs_queries
    stored_classes = range(1, len(layer.pools))
    keys = read_classes(plain_keys, layer, new.k.dtype, stored_classes) if reads else []
    values = read_classes(plain_values, layer, new.v.dtype, stored_classes) if fits else []
    ctx = Context(
        bias=bias,
        pos=pos,
        length=rows.length,
        prompt=rows.prompt,
        seed=rows.seed,
        k=jnp.concatenate([*keys, new.k], 2) if reads else None,
        v=jnp.concatenate([*values, new.v], 2) if fits else None,
        **queries_of(layer, rows, asked),
        mass=None if new.mass is None else joined("mass", new.mass),
        segment=None if rows.segment is None else _segment_of(rows.segment, pos),
        layer=jnp.asarray(index, jnp.int32),
        scale=scale,
    )
    recent = max(recipe.recent, recipe.window)
    must = protected(ctx, sinks=recipe.sinks, recent=recent, prompt=recipe.spares_prompt)
    must |= pos >= rows.leaving[:, None, None]
    room = recipe.room(rows.length, live.sum(-1, dtype=jnp.int32))
    if budgets is not None:
        room = jnp.broadcast_to(own(jnp.asarray(budgets, jnp.int32))[None], live.shape[:2])
    ctx = dataclasses.replace(ctx, must=must, room=room)
    choose = getattr(selector, "choose", None)
    scores, as_is = choose(ctx) if choose else (selector(ctx), jnp.zeros_like(live))
    stay = keep_mask(scores, live, pos, must, room) | ~rows.select[:, None, None]
    stay &= live
    change = None
    if matches:
        stored = keys_to_store(layer, new.into, new.leaves, new.k)
        counted = isinstance(recipe.selected, int) and not recipe.spares_prompt
        most = max(budgets or [recipe.selected]) if counted else live.shape[2]
        most = min(most, live.shape[2])
        stored = jnp.concatenate([*keys, stored], 2)
        change = match(recipe.compactor, ctx, stay, must | as_is, most, stored)
    sizes = [shape[2] * shape[3] for shape in shapes]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    *parts, last = jnp.split(stay, ends, -1)
    kept = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    return kept, last, change


def queries_of(layer: LayerCache, rows: Rows, asked=None) -> dict[str, Array]:
    """The queries of a selector's context, and their positions: the last ones, if none is asked."""
    if asked is not None:
        after = jnp.arange(asked.shape[1], dtype=jnp.int32)[None]
        return {"queries": asked, "query_pos": rows.length[:, None] + after}
    if layer.queries is None:
        return {}
    return {"queries": layer.queries, "query_pos": query_positions(layer, rows.length)}


def _segment_of(segment: Int[Array, "B L"], pos: Int[Array, "B Hkv S"]) -> Int[Array, "B Hkv S"]:
    at = jnp.clip(pos, 0, segment.shape[1] - 1).reshape(len(pos), -1)
    return jnp.take_along_axis(segment, at, 1).reshape(pos.shape)
