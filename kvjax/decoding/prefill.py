"""Reading a prompt: a chunk of tokens attends to the pages before it and to itself."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache import KVCache, LayerCache, append, reserve_layer
from kvjax.cache.working import HISTORY_BLOCK
from kvjax.compress.policy import Policy, policies
from kvjax.compress.selection import Rows
from kvjax.compress.settle import Incoming, leaving, settle
from kvjax.decoding.notes import note_prompt, with_segments
from kvjax.decoding.observe import prefill_mass, remember, shifted
from kvjax.dynakv.cached import as_stored, attend_history, latents, rebuilt
from kvjax.models.attention import (
    NEG_INF,
    add_sinks,
    biased_attention,
    causal_attention,
    lse_with_sinks,
    merge,
)
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.models.layers import embedded, logits_of, rms_norm
from kvjax.models.rope import rotation
from kvjax.recipes import Recipe, full
from kvjax.sharding import per_shard
from kvjax.sharding.across import summed
from pallas_kernels import SCRATCH_PAGE
from pallas_kernels.read import plain_keys, plain_values


def prefill_chunk(
    model: Decoder,
    cache: KVCache,
    logits: Float[Array, "B V"],
    tokens: Int[Array | np.ndarray, "B T"],
    count: Int[Array | np.ndarray, " B"],
    seed: Int[Array | np.ndarray, ""] | int = 0,
    *,
    recipe: Recipe | None = None,
    longest: int | None = None,
) -> tuple[KVCache, Float[Array, "B V"]]:
    """Read the next ``count`` tokens of every row; the rest of ``tokens`` is padding.

    Call it again for a longer prompt: a chunk attends to all that its row has kept before. What is
    not worth its slot is never stored: a chunk is selected from before it is written.

    Layers that are alike run the same compiled program, one after the other; under a caller's own
    ``jit`` all are one.

    Args:
        model: the decoder.
        cache: what the rows hold so far; its layers are donated.
        logits: logits after each row's last token so far (anything at the start); donated.
        tokens: right-padded token ids.
        count: how many of them belong to each row; 0 leaves a row as it is.
        seed: of selectors that draw.
        recipe: how the cache is kept; ``kvjax.recipes.full()`` if None.
        longest: the most tokens that any row has read after this, if the caller knows: within the
            budget nothing is selected from.

    Returns:
        The cache with the tokens in it, and the float32 logits after each row's last token.
    """
    recipe, config = recipe or full(), model.config
    x, angles, rows = begin(
        model.embed, cache.length, cache.stored, tokens, count, seed, config=config, recipe=recipe
    )
    cache = note_prompt(cache, tokens, count)
    # A model repeats its context while it answers, and not while it reads the prompt.
    holds = longest is not None and recipe.holds(longest)
    selects = not holds and not recipe.repeats
    if selects:
        rows = with_segments(rows, cache.ledger, recipe)
    x, cache = read_layers(model, cache, x, angles, rows, recipe, selects=selects)
    logits = _finish(model.norm, _head(model), logits, x, count, eps=config.rms_norm_eps)
    return cache, logits


def read_layers(
    model: Decoder,
    cache: KVCache,
    x: Float[Array, "B T E"],
    angles: tuple[Array, Array],
    rows: Rows,
    recipe: Recipe,
    *,
    settles: bool = True,
    selects: bool = True,
) -> tuple[Float[Array, "B T E"], KVCache]:
    """Let tokens through all layers, into the cache; what else it takes is what ``begin`` made.

    Args:
        settles: False leaves the tokens in the recent window, which must have room for them.
        selects: False keeps all of them.

    Returns:
        The hidden states before the final norm, and the cache, whose layers were donated.
    """
    config, layers, crowded = model.config, [], cache.crowded
    of_layer = policies(recipe, config)
    for index, (module, layer) in enumerate(zip(model.layers, cache.layers, strict=True)):
        x, layer, crowded = _read(
            module,
            layer,
            x,
            angles,
            rows,
            crowded,
            np.int32(index),
            config=config,
            recipe=recipe,
            policy=of_layer[index],
            window=config.windows[index],
            settles=settles,
            selects=selects,
        )
        layers.append(layer)
    return x, dataclasses.replace(
        cache,
        layers=tuple(layers),
        length=rows.length,
        prompt=rows.prompt,
        stored=rows.leaving if settles else rows.stored,
        crowded=crowded,
    )


@functools.partial(jax.jit, static_argnames=("config", "recipe"))
@per_shard
def begin(embed, length, stored, tokens, count, seed, *, config: ModelConfig, recipe: Recipe):
    """Embeddings, rotary angles and where each row stands."""
    positions = length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    after = length + count
    below = stored
    if not recipe.keeps_all:
        below = leaving(recipe, policies(recipe, config), stored, after, after)
    rows = Rows(
        before=length,
        length=after,
        prompt=after,
        stored=stored,
        leaving=below,
        select=count > 0,
        seed=jnp.asarray(seed, jnp.int32),
    )
    x = embedded(embed[...], tokens, config.vocab_size)
    return x, rotation(positions, config.rope, config.head_dim), rows


@functools.partial(
    jax.jit,
    static_argnames=("config", "recipe", "policy", "window", "settles", "selects"),
    donate_argnames=("layer", "x", "crowded"),
)
@per_shard
def _read(
    module,
    layer: LayerCache,
    x,
    angles,
    rows: Rows,
    crowded,
    index,
    *,
    config,
    recipe,
    policy,
    window,
    settles,
    selects,
):
    """One layer: attend, and settle what was read."""
    offset = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    positions = rows.before[:, None] + offset
    real = positions < rows.length[:, None]

    def attend(q, k, v, sinks):
        if layer.coder is not None:
            latent = latents(layer.coder, k, v, q.dtype)
            k, v = (x.astype(q.dtype) for x in rebuilt(layer.coder, latent, positions, config))
            local = causal_attention(q, k, v, positions, config.scale, window)
            out, lse = merge(*local, *attend_history(layer, config, window, q, positions))
            k, v = as_stored(latent)
        else:
            out, lse = attend_all(layer, policy, config, window, q, k, v, positions, rows.before)
        result = add_sinks(out, lse, sinks).astype(q.dtype)
        kept, mass = layer, None
        if recipe.needs_mass:
            norm = lse_with_sinks(lse, sinks)
            kept, mass = prefill_mass(layer, q, k, positions, real, norm, config.scale, window)
        kept = remember(kept, q, positions, real)
        if recipe.keeps_all or not settles:
            kept = reserve_layer(kept, rows.length)
            last = _last(kept, positions, rows)
            return result, (append(kept, k, v, positions, last, mass), crowded)
        # Attention first: what both take for a moment is more than they save where they overlap.
        result, k, v, after = jax.lax.optimization_barrier((result, k, v, rows))
        new = Incoming(k, v, mass)
        kept, lost = settle(
            kept, index, recipe, policy, config.scale, window, after, new, select=selects
        )
        return result, (kept, crowded + summed(lost))

    x, (layer, crowded) = module(x, angles, attend, recipe.key_stage)
    return x, layer, crowded


@functools.partial(jax.jit, static_argnames=("eps",), donate_argnames=("logits",))
@per_shard
def _finish(norm, head, logits, x, count, *, eps: float):
    """Logits after each row's last token."""
    last = jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], 1)[:, 0]
    new = logits_of(rms_norm(last, norm[...], eps), head[...], logits.shape[1])
    return jnp.where((count > 0)[:, None], new, logits)


def _head(model: Decoder):
    return model.embed if model.lm_head is None else model.lm_head


def _last(layer: LayerCache, positions: Int[Array, "B T"], rows: Rows):
    """The tokens that the first class can hold: all, but for a sliding window's last ones."""
    capacity = layer.tables[0].shape[2] * layer.pools[0].page_size
    keep = positions < rows.length[:, None]
    return keep & (positions >= (rows.length - capacity)[:, None])


def attend_all(
    layer: LayerCache,
    policy: Policy,
    config: ModelConfig,
    window: int | None,
    q: Float[Array, "B T Hq D"],
    k: Float[Array, "B T Hkv D"],
    v: Float[Array, "B T Hkv D"],
    positions: Int[Array, "B T"],
    before: Int[Array, " B"],
) -> tuple[Float[Array, "B T Hq D"], Float[Array, "B T Hq"]]:
    """Attention of new tokens to each other and to all that the layer holds, without sinks.

    Args:
        before: tokens that a row had read before them.

    Returns:
        The float32 output and the log-sum-exp.
    """
    out, lse = causal_attention(q, k, v, positions, config.scale, window)
    queries = shifted(policy, config, layer, q, before)
    for query, pool, table in zip(queries, layer.pools, layer.tables, strict=True):
        history = _attend_pages(query, positions, pool, table, config.scale, window)
        out, lse = merge(out, lse, *history)
    return out, lse


def _attend_pages(q, positions, pool, table, scale, window):
    """Attention to the pages of a class, block after block; as many as the fullest head owns."""
    rows, kv_heads, width = table.shape
    step = min(width, max(1, HISTORY_BLOCK // pool.page_size))
    owned = (table != SCRATCH_PAGE).sum(-1, dtype=jnp.int32).max()
    table = jnp.pad(table, ((0, 0), (0, 0), (0, -width % step)))  # with the scratch page

    def block(i, carry):
        pages = jax.lax.dynamic_slice_in_dim(table, i * step, step, 2)
        k = plain_keys(pool, pages, q.dtype).reshape(rows, kv_heads, -1, q.shape[-1])
        v = plain_values(pool, pages, q.dtype).reshape(k.shape)
        bias = pool.bias[pages].reshape(rows, kv_heads, -1)
        pos = pool.pos[pages].reshape(rows, kv_heads, -1)
        bias = bias[:, :, None]
        if window is not None:
            near = positions[:, None, :, None] - pos[:, :, None] < window
            bias = jnp.where(near, bias, -jnp.inf)
        return merge(*carry, *biased_attention(q, k, v, bias, scale))

    empty = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:-1], NEG_INF, jnp.float32)
    return jax.lax.fori_loop(0, -(-owned // step), block, empty)
