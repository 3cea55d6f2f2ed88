"""Caches of rows that have decoded for long, with random keys and values."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvjax.cache import KVCache, LayerCache, plan
from kvjax.cache.pages import take_pages
from kvjax.cache.slots import replace_class
from kvjax.compress.policy import policies
from kvjax.decoding.chunk import DecodeState
from kvjax.decoding.empty import spread_cache
from kvjax.models.config import ModelConfig
from kvjax.recipes import Recipe
from kvjax.sharding import per_shard
from kvjax.thoughts import Thoughts
from pallas_kernels import SCRATCH_PAGE

PROMPT = 64
"""Tokens of every row's prompt."""


@dataclasses.dataclass(frozen=True)
class Held:
    """Tokens of a coded class that a KV head holds.

    Attributes:
        pos: their positions.
        survives: demotions of its segment that each survives.
    """

    pos: Int[np.ndarray, " N"]
    survives: Int[np.ndarray, " N"]


def held(recipe: Recipe, config: ModelConfig, context: int) -> tuple[list[Held], np.ndarray]:
    """What is left of rows of ``context`` tokens, and the levels of their complete segments.

    Thoughts are in turn reasoning, execution and transition, and all of one size, the largest with
    which they fit the budget.
    """
    if recipe.retention is None:
        kept = context if recipe.budget is None else recipe.budget
        return [first(kept - recipe.window)], np.zeros(0, np.int32)
    retention, every = recipe.retention, recipe.segmenter.every
    count = (context - PROMPT) // every
    sizes = retention.sizes(every)
    level = next(n for n, size in enumerate(sizes) if size * count <= recipe.budget)
    token = np.arange(sizes[level])
    pos = PROMPT + every * np.arange(count)[:, None] + token * (every // len(token))
    survives = (token[:, None] < np.array(retention.schedule)).sum(1)
    policy, *_ = policies(recipe, config)  # layers differ in the queries that they keep
    into = np.array(policy.of_kind)[np.arange(count) % 3]
    found = []
    for index in range(1, 1 + len(policy.classes)):
        prompt = first(PROMPT if index == policy.of_prompt else 0)
        mine = pos[into == index]
        levels = np.broadcast_to(survives, mine.shape)
        found.append(
            Held(
                np.concatenate([prompt.pos, mine.ravel()]),
                np.concatenate([prompt.survives, levels.ravel()]),
            )
        )
    return found, np.full(count, level, np.int32)


def first(count: int) -> Held:
    """The first tokens of a row, which segments are not made of."""
    return Held(np.arange(count), np.zeros(count, np.int32))


def filled(
    config: ModelConfig,
    recipe: Recipe,
    rows: int,
    context: int,
    steps: int,
    given: list[Held] | None = None,
    tp: int = 1,
) -> DecodeState:
    """Every row at ``context`` tokens, those that are left of them with random keys and values, and
    room for as many steps.

    Args:
        tp: devices of the mesh that this is called on; each has its heads' pages.
        given: tokens of a KV head in each coded class; what the recipe's budget leaves if None.
    """
    # The first class has a slot for each position modulo its capacity.
    recent = context if recipe.keeps_all else recipe.window
    others, levels = ([], None) if recipe.keeps_all else held(recipe, config, context)
    others = given or others

    # Kept though their numbers are not read: what is dropped is not given up either.
    @functools.partial(jax.jit, donate_argnames="layer", keep_unused=True)
    @per_shard
    def fill(layer, key):
        for index, tokens in enumerate((None, *others)):
            pool, table, free = layer.pools[index], layer.tables[index], layer.free[index]
            pages = table.shape[2]
            if tokens is not None:
                pages = -(-len(tokens.pos) // pool.page_size)
            wanted = jnp.full(table.shape[:2], pages, jnp.int32)
            table, free = take_pages(free, table, wanted)
            key, *keys = jax.random.split(key, 3)
            k, v = (_random(x, like) for x, like in zip(keys, (pool.k, pool.v), strict=True))
            size, shape = table.shape[2] * pool.page_size, (1, 1, table.shape[2], pool.page_size)
            slot = jnp.arange(size, dtype=jnp.int32).reshape(shape)
            level = pool.level
            if tokens is None:  # the last ``recent`` positions
                pos = context - 1 - (context - 1 - slot) % size
                live = pos >= context - recent
            else:
                live = slot < len(tokens.pos)
                pos = _padded(tokens.pos, size).reshape(shape)
                if level is not None:
                    survives = _padded(tokens.survives, size).astype(level.dtype).reshape(shape)
                    level = level.at[table].set(survives)
            live &= (table != SCRATCH_PAGE)[..., None]
            pool = dataclasses.replace(
                pool,
                k=k,
                v=v,
                bias=pool.bias.at[table].set(jnp.where(live, 0.0, -jnp.inf)),
                pos=pool.pos.at[table].set(jnp.where(live, pos, -1)),
                k_scale=None if pool.k_scale is None else jnp.full_like(pool.k_scale, 0.1),
                v_scale=None if pool.v_scale is None else jnp.full_like(pool.v_scale, 0.1),
                level=level,
            )
            layer = replace_class(layer, index, pools=pool, tables=table, free=free)
        return layer

    cache = empty(config, recipe, rows, context + steps, tp)
    keys = jax.random.split(jax.random.key(1), config.num_layers)
    layers = tuple(fill(layer, key) for layer, key in zip(cache.layers, keys, strict=True))
    if cache.thoughts is not None:
        cache = dataclasses.replace(cache, thoughts=_thoughts(cache.thoughts, levels))
    return standing(cache, layers, rows, context, recent, steps)


def empty(config: ModelConfig, recipe: Recipe, rows: int, tokens: int, tp: int) -> KVCache:
    """A cache with room for rows of so many tokens, on the devices of the mesh."""
    planned = plan(
        config,
        recipe,
        batch_size=rows,
        prompt_tokens=PROMPT,
        max_new_tokens=tokens - PROMPT,
        dtype=jnp.bfloat16,
        parameter_bytes=0,
        tp=tp,
    )
    return spread_cache(None, geometry=planned.geometry)


def standing(
    cache: KVCache,
    layers: tuple[LayerCache, ...],
    rows: int,
    context: int,
    recent: int,
    steps: int,
) -> DecodeState:
    """Rows of ``context`` tokens, of which the last ``recent`` are in the recent window, with as
    many steps to go."""
    length = jnp.full(rows, context, jnp.int32)
    cache = dataclasses.replace(
        cache,
        layers=layers,
        length=length,
        prompt=jnp.full(rows, PROMPT, jnp.int32),
        stored=length - recent,
    )
    tokens, left = jnp.zeros(rows, jnp.int32), jnp.full(rows, steps, jnp.int32)
    return DecodeState(cache, tokens, left, jnp.ones(rows, bool))


def _thoughts(empty: Thoughts, levels: np.ndarray) -> Thoughts:
    segments = np.arange(len(levels))
    return dataclasses.replace(
        empty,
        kind=empty.kind.at[:, segments].set(segments % 3),
        level=empty.level.at[:, segments].set(levels),
    )


def _padded(numbers: np.ndarray, size: int):
    return jnp.asarray(np.pad(numbers, (0, size - len(numbers))), jnp.int32)


def _random(key, like):
    if jnp.issubdtype(like.dtype, jnp.floating):
        return jax.random.normal(key, like.shape, like.dtype)
    return jax.random.bits(key, like.shape, like.dtype)
