"""Whole sequences without a cache: what every cached path is compared with."""

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.errors import CapacityError, UsageError
from kvjax.models.attention import add_sinks, causal_mask, masked_attention
from kvjax.models.decoder import Decoder
from kvjax.models.rope import rotation

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel


def forward(lm: "LanguageModel", tokens) -> Float[Array, "B T V"]:
    """Float32 logits after every token of ``tokens``.

    Args:
        lm: a loaded model.
        tokens: token ids, [B, T] or one list of ids (which gives B = 1).

    Raises:
        UsageError: ``tokens`` are no ids of this model.
        CapacityError: the sequence exceeds the model's context.
    """
    ids = check_tokens(tokens, lm.config.vocab_size, lm.config.context_length)
    return _forward(lm.model, jnp.asarray(ids))


def check_tokens(tokens, vocab_size: int, context_length: int) -> np.ndarray:
    try:
        ids = np.asarray(tokens)
    except ValueError as error:
        raise UsageError("`tokens` must be rows of the same length") from error
    if ids.ndim not in (1, 2) or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise UsageError(
            f"`tokens` must be integers [B, T] or [T], got {ids.dtype} of shape {list(ids.shape)}"
        )
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise UsageError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")
    if ids.shape[-1] > context_length:
        raise CapacityError(
            f"{ids.shape[-1]} tokens exceed the model's context of {context_length}; shorten them"
        )
    return np.atleast_2d(ids).astype(np.int32)


def by_layer(
    model: Decoder,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: Callable[..., tuple[Float[Array, "B T Hq D"], Any]],
) -> Iterator[tuple[Float[Array, "B T E"], Any]]:
    """Read whole rows layer by layer; layers that are alike run the same compiled program.

    Args:
        model: the decoder.
        tokens: of each row.
        positions: of the tokens.
        attend: from ``q, k, v, sinks, positions, scale, window`` to a layer's attention and what is
            to be kept of it. Compiled for each such function: pass the same one.

    Yields:
        The hidden states behind each layer, and what ``attend`` kept.
    """
    config = model.config
    x, angles = _embed(model.embed, tokens, positions, config=config)
    how = {"attend": attend, "scale": config.scale}
    for layer, window in zip(model.layers, config.windows, strict=True):
        x, kept = _layer(layer, x, angles, positions, window=window, **how)
        yield x, kept


@functools.partial(jax.jit, static_argnames=("config",))
def _embed(embed, tokens, positions, *, config):
    return embed[...][tokens], rotation(positions, config.rope, config.head_dim)


@functools.partial(jax.jit, static_argnames=("attend", "scale", "window"))
def _layer(layer, x, angles, positions, *, attend, scale: float, window: int | None):
    def with_place(q, k, v, sinks):
        return attend(q, k, v, sinks, positions, scale, window)

    return layer(x, angles, with_place)


@jax.jit
def _forward(model: Decoder, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    config = model.config
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)

    def attend(index, cache, q, k, v, sinks):
        mask = causal_mask(positions, positions, config.windows[index])
        out, lse = masked_attention(q, k, v, mask, config.scale)
        return add_sinks(out, lse, sinks), cache

    hidden, _ = model(tokens, positions, attend, (None,) * config.num_layers)
    return model.logits(hidden)
