"""Reading given tokens where decoding would have chosen its own: teacher forcing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import KVCache, held_latents, reserve
from kvjax.cache import held as held_by_rows
from kvjax.decoding.chunk import DecodeState, decode_token
from kvjax.decoding.notes import note_prompt
from kvjax.decoding.prefill import begin, read_layers
from kvjax.models.decoder import Decoder
from kvjax.models.layers import rms_norm
from kvjax.recipes import Recipe
from pallas_kernels.paged_attention.api import Implementation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held:
    """What the rows hold: see ``kvjax.decoding.chunk.ChunkOutput``."""

    length: Int[Array, " B"]
    slots: Int[Array, "B L C"]
    pages: Int[Array, "B L C"]
    crowded: Int[Array, " B"]
    latents: Int[Array, "B L 4"] | None


@functools.partial(
    jax.jit,
    static_argnames=("width", "recipe", "with_layers", "kernel"),
    donate_argnames=("state",),
)
def force_chunk(
    model: Decoder,
    state: DecodeState,
    tokens: Int[Array, "N B"],
    *,
    width: int | None,
    recipe: Recipe,
    with_layers: bool = False,
    kernel: Implementation | None = None,
) -> tuple[DecodeState, Float[Array, "N B V"], Float[Array, "N L B Hq D"] | None, Held]:
    """``decode_chunk``, but for where the tokens come from: one step for each of ``tokens``.

    Args:
        state: donated. ``left`` says how many of the tokens are real; ``token`` is not looked at.
        width: as for ``decode_chunk``.
        with_layers: whether every layer's attention output is returned too.
        kernel: as for ``decode_chunk``.

    Returns:
        The state, the float32 logits after every token, the outputs, and what the rows hold.
    """
    ahead = jnp.minimum(state.left, len(tokens))
    state = dataclasses.replace(state, cache=reserve(state.cache, state.cache.length + ahead))

    def step(state, token):
        tap = [] if with_layers else None
        active = state.left > 0
        logits, cache = decode_token(
            model, state.cache, token, active, width, recipe, tap, kernel=kernel
        )
        left = jnp.maximum(state.left - 1, 0)
        finite = state.finite & (jnp.isfinite(logits).all(-1) | ~active)
        layers = None if tap is None else jnp.stack(tap)
        return DecodeState(cache, token, left, finite), (logits, layers)

    state, (logits, layers) = jax.lax.scan(step, state, tokens)
    return state, logits, layers, held(state.cache)


def force_together(
    model: Decoder,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    *,
    recipe: Recipe,
) -> tuple[DecodeState, Float[Array, "B T E"]]:
    """``force_chunk``, but for a tick's tokens all at once.

    What a token attends to is the same, and so is the result, up to rounding. A pass over the
    weights serves all the tokens.

    Args:
        state: the layers of its cache are donated. ``token`` is not looked at.
        tokens: right-padded token ids.
        count: how many of them belong to each row.

    Returns:
        The state, and the hidden states after the final norm.
    """
    config, cache = model.config, state.cache
    x, angles, rows = begin(
        model.embed, cache.length, cache.stored, tokens, count, 0, config=config, recipe=recipe
    )
    rows = dataclasses.replace(rows, prompt=cache.prompt)  # these tokens are none of it
    cache = note_prompt(cache, tokens, count)
    x, cache = read_layers(model, cache, x, angles, rows, recipe, settles=False)
    state = dataclasses.replace(state, cache=cache, left=state.left - count)
    return state, _normed(x, model.norm, eps=config.rms_norm_eps)


@functools.partial(jax.jit, static_argnames=("eps",))
def _normed(x, norm, *, eps: float):
    return rms_norm(x, norm[...], eps)


@jax.jit
def held(cache: KVCache) -> Held:
    # Numbers of its own: the cache's are in use again by the time that these are read.
    return Held(cache.length + 0, *held_by_rows(cache), cache.crowded + 0, held_latents(cache))
