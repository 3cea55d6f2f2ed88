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
from kvjax.sharding import per_shard
from kvjax.sharding.across import summed
from kvjax.thoughts import Thoughts
from kvjax.thoughts.demotion import make_fit, refresh
from kvjax.thoughts.pages import Segments, last_sparsity, retire, settle_levels

IDLE = -1
"""Steps of a row that does not run."""


def maintain(
    state: DecodeState,
    compress: Bool[Array | np.ndarray, " B"],
    seed: Int[Array | np.ndarray, ""] | int = 0,
    *,
    config: ModelConfig,
    recipe: Recipe,
    done: int | Int[np.ndarray, " B"],
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
        done: decode steps that each row has taken, or all of them have, a multiple of
            ``recipe.tick``; ``IDLE`` for a row that does not run. Thoughts are told apart, and
            segments become complete, after every ``recipe.segmenter.every`` of them, and selections
            come after every ``recipe.every``. At 0 the first thought's kind is all there is to do.
        model: the decoder, for a recipe that lets it repeat its context.
    """
    done = np.broadcast_to(np.asarray(done, np.int32), state.left.shape)
    if recipe.segmenter is not None and (_at_border(recipe, done) & (done >= 0)).any():
        state = _tell_thoughts(state, compress, config, recipe)
    if done.max() <= 0:
        return state
    cache = state.cache
    due = _selects(recipe, done)
    closing, demoting = _due(recipe, done)
    counters = cache.length, cache.prompt, cache.stored, cache.thoughts
    rows, thoughts, segments = _rows(
        *counters, state.left, compress, due, seed, config=config, recipe=recipe
    )
    select = bool(due.any()) and recipe.retention is None
    if select:
        rows = with_segments(rows, cache.ledger, recipe)
    asked = [None] * len(cache.layers)
    if select and recipe.repeats:
        asked = repeated_queries(model, cache, recipe)
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
            demoting,
            recipe=recipe,
            policy=policy,
            scale=config.scale,
            window=config.windows[index],
            select=select and ours,
            closing=bool(closing.any()) and ours,
            demotes=bool(demoting.any()) and ours,
            classes=_open_classes(recipe, policy, done),
        )
        layers.append(layer)
    cache = dataclasses.replace(
        cache, layers=tuple(layers), stored=rows.leaving, crowded=crowded, thoughts=thoughts
    )
    return dataclasses.replace(state, cache=cache)


def _open_classes(recipe: Recipe, policy: Policy, done: np.ndarray) -> tuple[int, ...] | None:
    """The classes that the answers' tokens go to, once the last of every prompt's has left."""
    if recipe.segmenter is None or done[done >= 0].min() < recipe.window + recipe.tick:
        return None
    return tuple(sorted(set(policy.of_kind)))


def _selects(recipe: Recipe, done: np.ndarray) -> np.ndarray:
    """The rows that it is time to select in; a retention asks the budget each time."""
    if recipe.retention is not None:
        return done > 0
    if not recipe.every:
        return np.zeros(done.shape, bool)
    return done == recipe.every if recipe.once else (done > 0) & (done % recipe.every == 0)


def _due(recipe: Recipe, done: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose segments can have become complete, and whose segments can have been demoted."""
    if recipe.retention is None:
        return np.zeros(done.shape, bool), np.zeros(done.shape, bool)
    past = (done - recipe.window) % recipe.segmenter.every
    closing = (done >= recipe.segmenter.every) & (past < recipe.tick)
    return closing, closing | (_at_border(recipe, done) & (done > 0))


def _at_border(recipe: Recipe, done: np.ndarray) -> np.ndarray:
    return done % recipe.segmenter.every == 0


def _tell_thoughts(
    state: DecodeState, compress, config: ModelConfig, recipe: Recipe
) -> DecodeState:
    """Find the kind of a segment, in the rows that are at a border."""
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
@per_shard
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
    length,
    prompt,
    stored,
    thoughts,
    left,
    compress,
    due,
    seed,
    *,
    config: ModelConfig,
    recipe: Recipe,
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
        select=compress & active & due,
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
        "demotes",
        "classes",
    ),
    donate_argnames=("layer", "crowded"),
)
@per_shard
def _settle(
    layer: LayerCache,
    rows: Rows,
    thoughts: Thoughts | None,
    segments: Segments | None,
    crowded,
    index,
    asked,
    demoting,
    *,
    recipe,
    policy,
    scale,
    window,
    select,
    closing,
    demotes,
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
    if demotes:
        given = recipe.retention, recipe.compactor, scale, rows.length
        layer = retire(layer, thoughts, segments, *given, demoting)
    return layer, crowded + summed(lost)
