"""Decoding: a scan over tokens inside one program, the state donated to it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import (
    KVCache,
    LayerCache,
    append,
    held,
    held_blocks,
    held_latents,
    put_rows,
    reserve,
)
from kvjax.cache.rows import put_each
from kvjax.compress.policy import policies
from kvjax.decoding.observe import note_mass, remember, shifted
from kvjax.decoding.sampling import Sampling, sample
from kvjax.dynakv.cached import as_stored, attend_step, latents
from kvjax.models.decoder import Decoder
from kvjax.recipes import Recipe, full
from kvjax.sharding import per_shard
from kvjax.sharding.across import summed
from kvjax.thoughts import Thoughts
from pallas_kernels import paged_attention
from pallas_kernels.paged_attention.api import Implementation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """What decoding carries from one token to the next.

    Attributes:
        cache: everything before ``token``.
        token: the last token chosen in each row; it is not in the cache yet.
        left: tokens that each row may still choose; a row with none is frozen.
        finite: False once a row's logits held NaN or infinity.
    """

    cache: KVCache
    token: Int[Array, " B"]
    left: Int[Array, " B"]
    finite: Bool[Array, " B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkOutput:
    """What the host reads of a chunk, apart from the state, which is in use again by then.

    Attributes:
        tokens: the token that each step chose in each row.
        real: False where the row was finished already.
        finite: False for a row whose logits held NaN or infinity.
        length: tokens that each row has read; the last one chosen is not among them.
        slots: live slots of each row, over all KV heads, for every layer and class.
        pages: pages that each row owns, likewise.
        crowded: tokens (of one layer and KV head each) that found no slot.
        thoughts: the rows' thoughts, where they are told apart.
        latents: what each row holds in every layer, where there are latents: see
            ``kvjax.cache.held_latents``.
        blocks: what it holds of each position, likewise: see ``kvjax.cache.held_blocks``.
    """

    tokens: Int[Array, "N B"]
    real: Bool[Array, "N B"]
    finite: Bool[Array, " B"]
    length: Int[Array, " B"]
    slots: Int[Array, "B L C"]
    pages: Int[Array, "B L C"]
    crowded: Int[Array, " B"]
    thoughts: Thoughts | None
    latents: Int[Array, "B L 4"] | None
    blocks: Int[Array, "B 3 S"] | None

    @classmethod
    def of(cls, state: DecodeState, tokens, real) -> "ChunkOutput":
        cache = state.cache
        # Numbers of their own: the cache's are in use again by the time that these are read.
        crowded, thoughts = jax.tree.map(lambda x: x + 0, (cache.crowded, cache.thoughts))
        of_heads = map(summed, held(cache))
        of_latents = held_latents(cache), held_blocks(cache)
        counts = cache.length + 0, *of_heads, crowded, thoughts, *of_latents
        return cls(tokens, real, state.finite, *counts)


def idle_state(cache: KVCache) -> DecodeState:
    """No row decodes anything yet.

    Args:
        cache: an empty one.
    """
    zero = np.zeros(cache.length.shape, np.int32)
    return DecodeState(cache, jnp.asarray(zero), jnp.asarray(zero), jnp.asarray(zero == 0))


def put_decoding(
    state: DecodeState, part: DecodeState, rows: Int[Array | np.ndarray, " K"]
) -> DecodeState:
    """The state with ``part`` in the rows that its cache was taken from (``take_rows``)."""
    cache = put_rows(state.cache, part.cache, rows)
    own = (state.token, state.left, state.finite)
    return DecodeState(cache, *put_each(own, (part.token, part.left, part.finite), rows))


@functools.partial(jax.jit, static_argnames=("stop_ids",), donate_argnames=("cache",))
@per_shard
def start_decoding(
    cache: KVCache,
    logits: Float[Array, "B V"],
    sampling: Sampling | None,
    max_new: Int[Array, " B"],
    *,
    stop_ids: tuple[int, ...],
) -> tuple[DecodeState, ChunkOutput]:
    """Choose every row's first token from the logits that prefill left.

    Args:
        cache: a prefilled cache; donated.
        logits: logits after each row's prompt.
        sampling: how to choose; None is greedy.
        max_new: tokens that each row may choose, this first one included; 0 for an empty row.
        stop_ids: tokens that end a row.
    """
    token = sample(logits, cache.length, sampling)
    finite = jnp.isfinite(logits).all(-1) | (max_new == 0)
    left = jnp.where(finite, _tokens_left(token, max_new, stop_ids), 0)
    state = DecodeState(cache, token, left, finite)
    return state, ChunkOutput.of(state, token[None], (max_new > 0)[None])


@functools.partial(
    jax.jit,
    static_argnames=("steps", "stop_ids", "width", "recipe", "kernel"),
    donate_argnames=("state",),
)
@per_shard
def decode_chunk(
    model: Decoder,
    state: DecodeState,
    sampling: Sampling | None,
    halt: Bool[Array, " B"],
    *,
    steps: int,
    stop_ids: tuple[int, ...],
    width: int | None = None,
    recipe: Recipe | None = None,
    kernel: Implementation | None = None,
) -> tuple[DecodeState, ChunkOutput]:
    """Decode ``steps`` tokens in every row that is not finished.

    Each step writes its token's key and value first and then attends, so that the cache is updated
    in place. A finished row stays as it is, whatever the others do.

    Args:
        model: the decoder.
        state: what the last chunk returned; donated.
        sampling: how to choose; None is greedy.
        halt: rows to finish before the first step.
        steps: tokens a row at most.
        stop_ids: tokens that end a row.
        width: slots of a KV head and class attended at most, if the caller knows that no row will
            have pages beyond; None attends to all that a row can own.
        recipe: how the cache is kept; ``kvjax.recipes.full()`` if None.
        kernel: what computes attention, as ``pallas_kernels.paged_attention`` has it.

    Returns:
        The new state, and what the host reads of it.
    """
    recipe = recipe or full()
    state = dataclasses.replace(state, left=jnp.where(halt, 0, state.left))
    ahead = jnp.minimum(state.left, steps)
    state = dataclasses.replace(state, cache=reserve(state.cache, state.cache.length + ahead))

    def step(state, _):
        active = state.left > 0
        logits, cache = decode_token(
            model, state.cache, state.token, active, width, recipe, kernel=kernel
        )
        token = jnp.where(active, sample(logits, cache.length, sampling), state.token)
        finite = state.finite & (jnp.isfinite(logits).all(-1) | ~active)
        # A row that is lost stops at once, before any page of it could go to another one.
        left = jnp.where(active & finite, _tokens_left(token, state.left, stop_ids), 0)
        return DecodeState(cache, token, left, finite), (token, active)

    state, (tokens, real) = jax.lax.scan(step, state, None, length=steps)
    return state, ChunkOutput.of(state, tokens, real)


def decode_token(model, cache: KVCache, token, active, width, recipe, tap=None, kernel=None):
    """Read one token a row; returns float32 logits [B, V] and the cache with the token in it.

    Args:
        tap: a list that gets every layer's attention output [B, Hq, D], if it is given.
    """
    position = cache.length
    config = model.config
    of_layer = policies(recipe, config)

    def attend(index, layer, q, k, v, sinks):
        if layer.coder is not None:
            k, v = as_stored(latents(layer.coder, k, v, q.dtype))
        layer = append(layer, k, v, position[:, None], active[:, None])
        layer = remember(layer, q, position[:, None], active[:, None])
        tables = [
            table[:, :, : None if width is None else -(-width // pool.page_size)]
            for pool, table in zip(layer.pools, layer.tables, strict=True)
        ]
        q, layer = _within_the_step(q, layer)
        given = {"q_pos": position, "window": config.windows[index], "sinks": sinks}
        if layer.coder is not None:
            span = layer.span if width is None else min(width, layer.span)
            out = attend_step(
                layer, q[:, 0], tables, config, span=span, implementation=kernel, **given
            )
        else:
            queries = shifted(of_layer[index], config, layer, q, position)
            out, _, *mass = paged_attention(
                [query[:, 0] for query in queries],
                layer.pools,
                tables,
                scale=config.scale,
                with_mass=recipe.needs_mass,
                implementation=kernel,
                **given,
            )
            for noted in mass:
                layer = note_mass(layer, tables, noted, active)
        if tap is not None:
            tap.append(out)
        return out[:, None].astype(q.dtype), layer

    hidden, layers = model(
        token[:, None], position[:, None], attend, cache.layers, recipe.key_stage
    )
    ledger = cache.ledger
    if ledger is not None:
        ledger = ledger.note(token[:, None], position[:, None], active[:, None])
    length = position + active.astype(jnp.int32)
    cache = dataclasses.replace(cache, layers=layers, length=length, ledger=ledger)
    return model.logits(hidden[:, 0]), cache


def _within_the_step(q, layer: LayerCache):
    """The same, with coded pages that seem to depend on the step.

    They stay as they are all through the scan, and XLA would decode them once, ahead of it, into as
    much memory as they save.
    """
    first, *rest = layer.pools
    if not rest:
        return q, layer
    q, rest = jax.lax.optimization_barrier((q, rest))
    return q, dataclasses.replace(layer, pools=(first, *rest))


def _tokens_left(token, left, stop_ids):
    """What is left after ``token``: nothing once it is a stop."""
    stopped = jnp.zeros(token.shape, bool)
    for stop in stop_ids:
        stopped |= token == stop
    return jnp.where(stopped, 0, jnp.maximum(left - 1, 0))
