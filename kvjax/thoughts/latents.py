"""ThinKV among latents: how sparse attention is, and what stays of a segment.

All heads share a token's latents, and so one set of tokens, which is chosen by all their keys.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.cache.cache import LayerCache
from kvjax.cache.slots import replace_class
from kvjax.dynakv.cached import find_tokens, places, read_tokens, rebuilt
from kvjax.models.config import ModelConfig
from kvjax.thoughts.retention import Retention, survivals
from pallas_kernels import SCRATCH_PAGE


def segment_levels(
    layer: LayerCache,
    config: ModelConfig,
    index: Int[Array, ""],
    retention: Retention,
    pos: Int[Array, "B T"],
    asked,
    seed: Int[Array, ""],
) -> LayerCache:
    """Note how many demotions each token at some positions survives, in all of its blocks.

    Args:
        pos: of whole segments, -1 in rows that have none.
        asked: of the segments' keys, what the last queries attend to; see `survivals`.
    """
    pool, table = layer.pools[1], layer.tables[1]
    tokens = find_tokens(pool, table, layer.span)
    latent = read_tokens(pool, table, tokens, pos)
    keys = rebuilt(layer.coder, latent, pos, config)[0].swapaxes(1, 2)
    retention = dataclasses.replace(retention, shared=True)
    levels = survivals(retention, keys, asked(keys), pos, seed, index)[:, :1]
    pages, slots = places(pool, table, tokens, pos)
    # What is not there is beyond the last page.
    at = jnp.where(pages == SCRATCH_PAGE, len(pool.pos), pages)
    new = jnp.broadcast_to(levels.astype(jnp.uint8), at.shape)
    level = pool.level.at[at, slots].set(new, mode="drop")
    return replace_class(layer, 1, pools=dataclasses.replace(pool, level=level))
