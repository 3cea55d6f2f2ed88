"""Which tokens stay where their latents are kept: one set for all heads, which share them."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.cache import LayerCache
from kvjax.compress.context import Context
from kvjax.compress.keep import keep_mask, protected
from kvjax.compress.selection import Rows, queries_of
from kvjax.dynakv.cached import held_keys, rebuilt
from kvjax.models.config import ModelConfig
from kvjax.recipes import Recipe
from kvjax.sharding.across import gathered


def latent_selection(
    layer: LayerCache,
    index: Int[Array, ""] | int,
    recipe: Recipe,
    config: ModelConfig,
    rows: Rows,
    pos: Int[Array, "B M"],
    latent: Float[Array, "B 2 M d"],
    keep: Bool[Array, "B 2 M"],
) -> tuple[list[Bool[Array, "B N P page"]], Bool[Array, "B 2 M"]]:
    """What stays of the class of latents, and of the tokens that are not in it yet.

    The selector sees rebuilt keys, all of them at once for as long as it takes. Its scores are
    averaged over KV heads: the paper takes one set of tokens for all of them (section 5.2) and does
    not say how heads are put together.

    Args:
        pos: positions of the candidates.
        latent: theirs.
        keep: where there is one.
    """
    pool, table = layer.pools[1], layer.tables[1]
    held, at = held_keys(layer, 1, config)
    new, _ = rebuilt(layer.coder, latent.swapaxes(1, 2), pos, config)
    k = jnp.concatenate([held, new.swapaxes(1, 2)], 2)
    live = jnp.concatenate([at >= 0, keep[:, 0]], 1)
    pos = jnp.concatenate([at, pos], 1)
    heads = k.shape[:3]
    ctx = Context(
        bias=jnp.broadcast_to(jnp.where(live, 0.0, -jnp.inf)[:, None], heads),
        pos=jnp.broadcast_to(pos[:, None], heads),
        length=rows.length,
        prompt=rows.prompt,
        seed=rows.seed,
        k=k.astype(latent.dtype),
        **queries_of(layer, rows),
        layer=jnp.asarray(index, jnp.int32),
        scale=config.scale,
    )
    recent = max(recipe.recent, recipe.window)
    must = protected(ctx, sinks=recipe.sinks, recent=recent, prompt=recipe.spares_prompt)[:, 0]
    must |= pos >= rows.leaving[:, None]
    room = recipe.room(rows.length, live.sum(-1, dtype=jnp.int32, keepdims=True))
    scores = gathered(recipe.selector(ctx), axis=1).mean(1, keepdims=True)
    stay = keep_mask(scores, live[:, None], pos[:, None], must[:, None], room)[:, 0]
    stay = (stay | ~rows.select[:, None]) & live
    row = jnp.arange(len(pos), dtype=jnp.int32)[:, None]
    where = jnp.where(stay, pos, layer.span)
    stays = jnp.zeros((len(pos), layer.span), bool).at[row, where].set(True, mode="drop")
    slots = jnp.maximum(pool.pos[table], 0).reshape(len(pos), -1)
    kept = jnp.take_along_axis(stays, slots, 1).reshape(*table.shape, pool.page_size)
    return [kept], keep & stay[:, None, at.shape[1] :]
