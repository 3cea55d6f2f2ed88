"""Work on the cache between two chunks of decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.cache import LayerCache
from kvjax.compress.policy import policies
from kvjax.compress.settle import Rows, leaving, settle
from kvjax.decoding.chunk import DecodeState
from kvjax.models.config import ModelConfig
from kvjax.recipes import Recipe


def maintain(
    state: DecodeState,
    compress: Bool[Array | np.ndarray, " B"],
    seed: Int[Array | np.ndarray, ""] | int = 0,
    *,
    config: ModelConfig,
    recipe: Recipe,
    select: bool,
) -> DecodeState:
    """Move what is no longer recent into pages, and select.

    A row is worked on by its own lengths alone; a finished one stays as it is. Layers that are
    alike run the same compiled program, one after the other.

    Args:
        state: what ``decode_chunk`` returned; the layers of its cache are donated.
        compress: rows that are in a phase in which tokens are selected.
        seed: of selectors that draw.
        config: the model's.
        recipe: how the cache is kept.
        select: whether this is the time for a selection; it is after every ``recipe.every`` steps.
    """
    cache = state.cache
    rows = _rows(
        cache.length,
        cache.prompt,
        cache.stored,
        state.left,
        compress,
        seed,
        config=config,
        recipe=recipe,
    )
    layers, crowded = [], cache.crowded
    for index, (layer, policy) in enumerate(
        zip(cache.layers, policies(recipe, config), strict=True)
    ):
        layer, crowded = _settle(
            layer,
            rows,
            crowded,
            np.int32(index),
            recipe=recipe,
            policy=policy,
            scale=config.scale,
            window=config.windows[index],
            select=select and policy.keeps == "budget",
        )
        layers.append(layer)
    cache = dataclasses.replace(cache, layers=tuple(layers), stored=rows.leaving, crowded=crowded)
    return dataclasses.replace(state, cache=cache)


@functools.partial(jax.jit, static_argnames=("config", "recipe"))
def _rows(length, prompt, stored, left, compress, seed, *, config: ModelConfig, recipe: Recipe):
    active = left > 0
    below = leaving(recipe, policies(recipe, config), stored, length)
    return Rows(
        before=length,
        length=length,
        prompt=prompt,
        stored=stored,
        leaving=jnp.where(active, below, stored),
        select=compress & active,
        seed=jnp.asarray(seed, jnp.int32),
    )


@functools.partial(
    jax.jit,
    static_argnames=("recipe", "policy", "scale", "window", "select"),
    donate_argnames=("layer", "crowded"),
)
def _settle(
    layer: LayerCache, rows: Rows, crowded, index, *, recipe, policy, scale, window, select
):
    layer, lost = settle(layer, index, recipe, policy, scale, window, rows, select=select)
    return layer, crowded + lost
