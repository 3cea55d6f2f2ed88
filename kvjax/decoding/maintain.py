"""Work on the cache between two chunks of decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import LayerCache
from kvjax.compress.policy import Policy, policies
from kvjax.compress.selection import Rows
from kvjax.compress.settle import leaving, settle
from kvjax.decoding.chunk import DecodeState
from kvjax.decoding.notes import with_segments
from kvjax.decoding.repeat import repeated_queries
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.recipes import Recipe
from kvjax.thoughts import Thoughts
from kvjax.thoughts.demotion import make_fit, refresh
from kvjax.thoughts.pages import Segments, last_sparsity, retire, settle_levels


def maintain(
    state: DecodeState,
    compress: Bool[Array | np.ndarray, " B"],
    seed: Int[Array | np.ndarray, ""] | int = 0,
    *,
    config: ModelConfig,
    recipe: Recipe,
    done: int,
    model: Decoder | None = None,
) -> DecodeState:
    """Move what is no longer recent into pages; tell thoughts apart, and evict, when it is time.

    A row is worked on by its own lengths alone; a finished one stays as it is. Layers that are
    alike run the same compiled program, one after the other.

    Args:
        state: what ``decode_chunk`` returned; the layers of its cache are donated.
        compress: rows that are in a phase in which tokens are selected.
        seed: of selectors that draw.
        config: the model's.
        recipe: how the cache is kept.
        done: decode steps so far, a multiple of ``recipe.tick``: thoughts are told apart, and
            segments become complete, after every ``recipe.segmenter.every`` of them, and selections
            come after every ``recipe.every``. At 0 the first thought's kind is all there is to do.
        model: the decoder, for a recipe that lets it repeat its context.
    """
    if recipe.segmenter is not None:
        state = _tell_thoughts(state, compress, config, recipe, done)
    if not done:
        return state
    cache = state.cache
    counters = cache.length, cache.prompt, cache.stored, cache.thoughts
    rows, thoughts, segments = _rows(
        *counters, state.left, compress, seed, config=config, recipe=recipe
    )
    select = _selects(recipe, done)
    if select:
        rows = with_segments(rows, cache.ledger, recipe)
    asked = [None] * len(cache.layers)
    if select and recipe.repeats:
        asked = repeated_queries(model, cache, recipe)
    closing, demoting = _due(recipe, done)
    layers, crowded = [], cache.crowded
    for index, (layer, policy) in enumerate(
        zip(cache.layers, policies(recipe, config), strict=True)
    ):
        ours = policy.keeps == "budget"
        layer, crowded = _settle(
            layer,
            rows,
            thoughts,
            segments,
            crowded,
            np.int32(index),
            asked[index],
            recipe=recipe,
            policy=policy,
            scale=config.scale,
            window=config.windows[index],
            select=select and ours,
            closing=closing and ours,
            demoting=demoting and ours,
            classes=_open_classes(recipe, policy, done),
        )
        layers.append(layer)
    cache = dataclasses.replace(
        cache, layers=tuple(layers), stored=rows.leaving, crowded=crowded, thoughts=thoughts
    )
    return dataclasses.replace(state, cache=cache)


def _open_classes(recipe: Recipe, policy: Policy, done: int) -> tuple[int, ...] | None:
    """The classes that the answer's tokens go to, once the last of the prompt's has left."""
    if recipe.segmenter is None or done < recipe.window + recipe.tick:
        return None
    return tuple(sorted(set(policy.of_kind)))


def _selects(recipe: Recipe, done: int) -> bool:
    """Whether it is time for a selection."""
    if recipe.retention is not None or not recipe.every:
        return False
    return done == recipe.every if recipe.once else done % recipe.every == 0


def _due(recipe: Recipe, done: int) -> tuple[bool, bool]:
    """Whether segments can have become complete, and whether any can have been demoted."""
    if recipe.retention is None:
        return False, False
    past = (done - recipe.window) % recipe.segmenter.every
    closing = done >= recipe.segmenter.every and past < recipe.tick
    return closing, closing or done % recipe.segmenter.every == 0


def _tell_thoughts(
    state: DecodeState, compress, config: ModelConfig, recipe: Recipe, done: int
) -> DecodeState:
    """Find the kind of a segment, where rows are at a border."""
    if done % recipe.segmenter.every:
        return state
    cache = state.cache
    samples = tuple(
        _sparsity(
            cache.layers[layer],
            cache.length,
            config=config,
            corrected=recipe.segmenter.corrected,
        )
        for layer in recipe.segmenter.layers
    )
    thoughts = _refresh(
        cache.thoughts, samples, cache.length, cache.prompt, state.left, compress, recipe=recipe
    )
    return dataclasses.replace(state, cache=dataclasses.replace(cache, thoughts=thoughts))


@functools.partial(jax.jit, static_argnames=("config", "corrected"))
def _sparsity(layer: LayerCache, length, *, config: ModelConfig, corrected: bool):
    return last_sparsity(layer, config.scale, length, corrected, config)


@functools.partial(jax.jit, static_argnames=("recipe",))
def _refresh(
    thoughts: Thoughts,
    samples: tuple[Float[Array, " B"], ...],
    length: Int[Array, " B"],
    prompt: Int[Array, " B"],
    left: Int[Array, " B"],
    compress: Bool[Array, " B"],
    *,
    recipe: Recipe,
) -> Thoughts:
    unknown = jnp.full(length.shape, jnp.nan, jnp.float32)
    sparsity = jnp.stack(samples).mean(0) if samples else unknown
    return refresh(
        thoughts,
        recipe.segmenter,
        recipe.retention,
        sparsity,
        length - prompt,
        left > 0,
        compress,
    )


@functools.partial(jax.jit, static_argnames=("config", "recipe"))
def _rows(
    length, prompt, stored, thoughts, left, compress, seed, *, config: ModelConfig, recipe: Recipe
):
    """Where the rows stand, and what the budget makes of their thoughts."""
    active = left > 0
    below = leaving(recipe, policies(recipe, config), stored, length, prompt)
    rows = Rows(
        before=length,
        length=length,
        prompt=prompt,
        stored=stored,
        leaving=jnp.where(active, below, stored),
        select=compress & active,
        seed=jnp.asarray(seed, jnp.int32),
    )
    if recipe.retention is None:
        return rows, thoughts, None
    every = recipe.segmenter.every
    were, closed = (jnp.maximum(pos - prompt, 0) // every for pos in (stored, rows.leaving))
    segments = Segments(prompt, jnp.where(closed > were, closed - 1, -1), every)
    budget = recipe.retained(length - prompt)
    fitted = make_fit(thoughts, every, recipe.retention, closed, budget)
    return rows, _where(rows.select, fitted, thoughts), segments


def _where(rows: Bool[Array, " B"], new: Thoughts, old: Thoughts) -> Thoughts:
    return jax.tree.map(lambda a, b: jnp.where(rows[:, None], a, b), new, old)


@functools.partial(
    jax.jit,
    static_argnames=(
        "recipe",
        "policy",
        "scale",
        "window",
        "select",
        "closing",
        "demoting",
        "classes",
    ),
    donate_argnames=("layer", "crowded"),
)
def _settle(
    layer: LayerCache,
    rows: Rows,
    thoughts: Thoughts | None,
    segments: Segments | None,
    crowded,
    index,
    asked,
    *,
    recipe,
    policy,
    scale,
    window,
    select,
    closing,
    demoting,
    classes,
):
    layer, lost = settle(
        layer,
        index,
        recipe,
        policy,
        scale,
        window,
        rows,
        select=select,
        thoughts=thoughts,
        classes=classes,
        asked=asked,
    )
    if closing:
        layer = settle_levels(
            layer, index, recipe.retention, segments, scale, rows.length, rows.seed, policy.config
        )
    if demoting:
        layer = retire(
            layer, thoughts, segments, recipe.retention, recipe.compactor, scale, rows.length
        )
    return layer, crowded + lost
