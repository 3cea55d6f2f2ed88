"""A pass over tokens without a cache, to compare with."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.errors import UsageError
from kvjax.loading import LanguageModel
from kvjax.models.attention import add_sinks, causal_attention
from kvjax.models.forward import by_layer, check_tokens
from kvjax.models.layers import rms_norm


@dataclasses.dataclass(frozen=True)
class Reference:
    """A pass over tokens without a cache; one serves any number of comparisons on these tokens.

    Attributes:
        ids: the tokens.
        prompt_tokens: how many of the first are a prompt.
        hidden: hidden states from which each token after the prompt is predicted, position first.
        outputs: attention outputs of every layer at the tokens that are fed, if asked for.
    """

    ids: np.ndarray
    prompt_tokens: int
    hidden: Float[Array, "N B E"]
    outputs: tuple[Float[Array, "B S Hq D"], ...] | None


def reference(
    lm: LanguageModel, tokens, *, prompt_tokens: int, per_layer: bool = False
) -> Reference:
    """Read tokens without a cache, for ``compare``, whose arguments these are.

    Raises:
        UsageError: tokens or ``prompt_tokens`` cannot be used.
        CapacityError: the rows exceed the model's context.
    """
    config, model = lm.config, lm.model
    ids = check_tokens(tokens, config.vocab_size, config.context_length)
    if not 0 < prompt_tokens < ids.shape[1]:
        raise UsageError(
            f"prompt_tokens must leave at least one of {ids.shape[1]} tokens to score, "
            f"got {prompt_tokens}"
        )
    fed = jnp.asarray(ids[:, :-1])
    positions = jnp.broadcast_to(jnp.arange(fed.shape[1], dtype=jnp.int32)[None], fed.shape)
    outputs = []
    for x, out in by_layer(model, fed, positions, _attend):  # noqa: B007 - the last x is wanted
        if per_layer:
            outputs.append(out[:, prompt_tokens:])
    hidden = _norm(model.norm, x[:, prompt_tokens - 1 :], eps=config.rms_norm_eps)
    return Reference(
        ids, prompt_tokens, hidden.swapaxes(0, 1), tuple(outputs) if per_layer else None
    )


@functools.partial(jax.jit, static_argnames=("eps",))
def _norm(norm, x, *, eps: float):
    return rms_norm(x, norm[...], eps)


def _attend(q, k, v, sinks, positions, scale: float, window: int | None):
    out, lse = causal_attention(q, k, v, positions, scale, window)
    out = add_sinks(out, lse, sinks).astype(q.dtype)
    return out, out
