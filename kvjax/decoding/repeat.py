"""Reference queries of a model that repeats its context: attention matching's own (section 3.3).

The model is told to repeat what it has read and is given it again, as if it had answered so; the
queries of that answer see the whole cache as it is. Nothing of it is stored.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import KVCache, LayerCache
from kvjax.compress.policy import Policy, policies
from kvjax.decoding.prefill import attend_all, begin
from kvjax.models.attention import add_sinks
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.recipes import Recipe
from kvjax.sharding import per_shard


def repeated_queries(
    model: Decoder, cache: KVCache, recipe: Recipe
) -> list[Float[Array, "B N Hq D"]]:
    """Queries of every layer, at evenly spaced tokens of the repetition.

    Args:
        model: the decoder.
        cache: what the rows hold; its ledger has the tokens that they have read.
        recipe: whose compactor says how many queries there are to be.
    """
    ledger, config, count = cache.ledger, model.config, recipe.compactor.queries
    tokens, real, places = _script(ledger.instruction, ledger.tokens, cache.length, count=count)
    x, angles, rows = begin(
        model.embed, cache.length, cache.stored, tokens, real, 0, config=config, recipe=recipe
    )
    found = []
    for index, (module, layer) in enumerate(zip(model.layers, cache.layers, strict=True)):
        x, queries = _read(
            module,
            layer,
            x,
            angles,
            rows.before,
            places,
            config=config,
            policy=policies(recipe, config)[index],
            window=config.windows[index],
        )
        found.append(queries["asked"])
    return found


@functools.partial(jax.jit, static_argnames=("count",))
def _script(instruction, tokens, length, *, count: int):
    """What is read: the instruction and the row's tokens; and where queries are taken."""
    head = jnp.broadcast_to(instruction, (len(tokens), len(instruction)))
    script = jnp.concatenate([head, tokens], 1)
    first = len(instruction)
    step = jnp.arange(count, dtype=jnp.int32)[None] * length[:, None] // count
    return script, first + length, jnp.minimum(first + step, script.shape[1] - 1)


@functools.partial(jax.jit, static_argnames=("config", "policy", "window"), donate_argnames=("x",))
@per_shard
def _read(
    module,
    layer: LayerCache,
    x: Float[Array, "B T E"],
    angles: tuple[Array, Array],
    before: Int[Array, " B"],
    places: Int[Array, "B N"],
    *,
    config: ModelConfig,
    policy: Policy,
    window: int | None,
) -> tuple[Float[Array, "B T E"], dict[str, Float[Array, "B N Hq D"]]]:
    """One layer, which stays as it is."""
    positions = before[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None]

    def attend(q, k, v, sinks):
        out, lse = attend_all(layer, policy, config, window, q, k, v, positions, before)
        asked = jnp.take_along_axis(q, places[..., None, None], 1)
        return add_sinks(out, lse, sinks).astype(q.dtype), {"asked": asked}

    return module(x, angles, attend)
