"""The attention sparsity of every step of an answer, in every layer."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.plan import bucket
from kvjax.errors import NumericalError, UsageError
from kvjax.loading import LanguageModel
from kvjax.models.attention import add_sinks, causal_mask, masked_attention
from kvjax.models.forward import by_layer, check_tokens
from kvjax.thoughts.sparsity import dense_sparsity

QUERY_BLOCK = 256
"""Queries attended at once: bounds the memory of the scores."""


def record(lm: LanguageModel, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """Measure the steps that would decode ``answer`` with the full cache.

    One pass without a cache over prompt and answer, in the model's dtype: a token's query sees what
    it would have seen in a cache that keeps everything, itself included. Layers with a sliding
    window see their window.

    Args:
        lm: what ``kvjax.load`` returned.
        prompt: its token ids.
        answer: the token ids that follow, whoever chose them.

    Returns:
        Float32 [layers, answer tokens]; see ``kvjax.thoughts.sparsity``.

    Raises:
        UsageError: the tokens cannot be used.
        CapacityError: they exceed the model's context.
        NumericalError: a layer's attention is not finite.
    """
    if not len(prompt) or not len(answer):
        raise UsageError(
            f"prompt and answer need a token each, got {len(prompt)} and {len(answer)} tokens"
        )
    config, model = lm.config, lm.model
    [ids] = check_tokens([*prompt, *answer], config.vocab_size, config.context_length)
    # Padding comes last, where no token sees it.
    tokens = np.zeros((1, bucket(len(ids))), np.int32)
    tokens[0, : len(ids)] = ids
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    read = by_layer(model, jnp.asarray(tokens), positions, _attend)
    found = [sparsity[0] for _, sparsity in read]
    measured = np.stack(found)[:, len(prompt) : len(ids)]
    if not (finite := np.isfinite(measured).all(1)).all():
        raise NumericalError(
            f"the attention of layer {int(finite.argmin())} holds NaN or infinity; try --dtype "
            "float32, or check the weights"
        )
    return measured


def _attend(q, k, v, sinks, positions, scale: float, window: int | None):
    """A layer's attention over a whole row, a block of queries at a time, and its sparsity."""

    def of_block(block):
        q, at = block
        mask = causal_mask(at, positions, window)
        out, lse = masked_attention(q, k, v, mask, scale)
        return add_sinks(out, lse, sinks).astype(q.dtype), dense_sparsity(q, k, mask, scale)

    size = min(QUERY_BLOCK, q.shape[1])
    blocks = (q.reshape(-1, 1, size, *q.shape[2:]), positions.reshape(-1, 1, size))
    out, sparsity = jax.lax.map(of_block, blocks)
    return out.reshape(q.shape), sparsity.reshape(positions.shape)
