"""When the tokens of a trace leave the cache, while the model is trained.

Random eviction with a budget, as a process: once the budget is full, every new token takes the
place of one of those held, so that a token's time in the cache is exponential with the budget for
its mean. A selector is not as even as that: it drops some words, or whole paragraphs, before
others, in one head and not in another. So a token's rate is varied by what it is and by where it
is, differently in every layer and KV head, and in some rows all heads drop the same tokens. No
selector takes part in this; the prompt always stays.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.train.reasoner import vocabulary
from kvjax.train.reasoner.model import CHUNKS

RECENT = 32
"""How many of the last tokens are never hidden (as recipes protect them)."""
_PARAGRAPHS = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hiding:
    """How each row of a batch is evicted.

    Attributes:
        share: of the trace's tokens that the budget holds; infinite for a row with all of them.
        rough: how unevenly, 0 for not at all.
        together: whether all layers and heads drop the same tokens.
    """

    share: Float[Array, " B"]
    rough: Float[Array, " B"]
    together: Float[Array, " B"]


def first_hidden(
    key: Array,
    layer: int,
    heads: int,
    tokens: Int[Array, "B T"],
    prompt: Int[Array, " B"],
    length: Int[Array, " B"],
    hiding: Hiding,
) -> Int[Array, "B T Hkv"]:
    """The chunk of the row from which each token is hidden; `CHUNKS` for never.

    Args:
        key: of the batch.
        layer: index of the layer.
        heads: KV heads.
        tokens: of each row.
        prompt: tokens of the prompt, the first ones.
        length: tokens of prompt and trace.
        hiding: how.
    """
    rows, width = tokens.shape
    wide = (rows, width, heads)
    of_batch, of_layers = jax.random.split(key)
    draws = jax.random.split(jax.random.fold_in(of_layers, layer), 3)
    alone = jax.random.exponential(draws[0], wide)
    shared = jax.random.exponential(of_batch, (rows, width, 1))
    times = jnp.where(hiding.together[:, None, None] > 0, shared, alone)
    words = jax.random.normal(draws[1], (rows, heads, vocabulary.SIZE))
    places = jax.random.normal(draws[2], (rows, heads, _PARAGRAPHS))
    paragraph = jnp.cumsum(tokens == vocabulary.BREAK, axis=1, dtype=jnp.int32) % _PARAGRAPHS
    uneven = _pick(words, tokens) + _pick(places, paragraph)
    rate = jnp.exp(hiding.rough[:, None, None] * uneven.swapaxes(1, 2))

    budget = hiding.share * (length - prompt).astype(jnp.float32)
    at = jnp.arange(width, dtype=jnp.int32)[None]
    full = prompt.astype(jnp.float32) + budget
    safe = jnp.maximum((at + RECENT).astype(jnp.float32), full[:, None])
    end = safe[..., None] + budget[:, None, None] * times / rate
    chunk = jnp.ceil(jnp.minimum(end, width) / -(-width // CHUNKS)).astype(jnp.int32)
    stays = (at < prompt[:, None]) | jnp.isinf(hiding.share)[:, None]
    return jnp.where(stays[..., None], CHUNKS, jnp.minimum(chunk, CHUNKS))


def _pick(table: Float[Array, "B H N"], index: Int[Array, "B T"]) -> Float[Array, "B H T"]:
    return jnp.take_along_axis(table, index[:, None], axis=2)
