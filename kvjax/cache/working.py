"""What reading a prompt takes for a while, beside the weights and the cache."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.cache.geometry import LayerGeometry
from kvjax.models.attention import QUERY_BLOCK
from kvjax.models.config import ModelConfig

HISTORY_BLOCK = 512
"""Slots of the pages before the chunk that are attended at once."""
_FLOAT32 = 4
_COPIES = 2
"""Of scores: a softmax reads logits and writes weights."""
_HEADS = 4
"""Float32 arrays of the size of the queries: the queries turned, and outputs to be merged."""


def prefill_row_bytes(
    config: ModelConfig, layers: tuple[LayerGeometry, ...], tokens: int, dtype: DTypeLike
) -> int:
    """About the largest temporaries of one row while a chunk of a prompt is read.

    They are those of the widest layer, one layer being read after the other: attention's (its
    scores, or the attention that slots note) or the feed-forward part's, whichever are larger, and
    the logits. On a CPU, XLA runs the blocks of a chunk's attention side by side, so that the
    scores of all of them exist at once, and multiplies bfloat16 numbers as float32; elsewhere one
    block follows the other, and what is noted is summed as it is made. What a selector needs
    besides is left out. Within a factor of 1.5 of what XLA plans for the compiled program, for
    chunks of 500 tokens and more.

    Args:
        config: the model.
        layers: of the cache.
        tokens: of the chunk, padding included.
        dtype: of the model.
    """
    every = _FLOAT32 * config.num_heads * tokens  # of one key's scores
    blocks = [min(start + QUERY_BLOCK, tokens) for start in range(0, tokens, QUERY_BLOCK)]
    block = _COPIES * _FLOAT32 * config.num_heads * min(QUERY_BLOCK, tokens)
    local = [block * end for end in blocks]
    attention = 0
    for layer in layers:
        history = [_COPIES * every * min(HISTORY_BLOCK, shape.capacity) for shape in layer.classes]
        noted = [every * shape.capacity for shape in layer.classes if shape.mass]
        mass = [*noted, every * tokens] if noted else [0]
        if jax.default_backend() == "cpu":
            attention = max(attention, sum(local), *history, _COPIES * sum(mass))
        else:
            attention = max(attention, *local, *history, *mass)
    attention += _HEADS * every * config.head_dim
    chosen = config.experts_per_token or 1
    inner = chosen * (3 * config.intermediate_size + config.hidden_size)
    each = _FLOAT32 if jax.default_backend() == "cpu" else jnp.dtype(dtype).itemsize
    feed_forward = tokens * inner * each
    return max(attention, feed_forward) + 2 * _FLOAT32 * config.vocab_size
