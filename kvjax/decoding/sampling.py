"""Choosing the next token."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How each row samples. A filter that no row uses is None, so that it costs nothing.

    Attributes:
        key: one a row, of the seed and the number of its sample; folded with the row's positions,
            so that neighbours make no difference.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: keep the ``top_k`` most likely tokens; 0 keeps all.
        top_p: keep the fewest most likely tokens whose mass reaches ``top_p``; 1 keeps all.
        min_p: keep tokens at least ``min_p`` times as likely as the most likely one; 0 keeps all.
    """

    key: Key[Array, " B"]
    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"] | None = None
    top_p: Float[Array, " B"] | None = None
    min_p: Float[Array, " B"] | None = None

    @classmethod
    def create(
        cls,
        rows: int,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        samples: Sequence[int] | None = None,
    ) -> "Sampling | None":
        """One setting and one seed for all rows; None where it means greedy decoding.

        Args:
            samples: which of its prompt's samples each row draws; the first, 0, where None.
        """
        if temperature == 0:
            return None

        def fill(value, dtype):
            return jnp.full(rows, value, dtype)

        key = jnp.broadcast_to(jax.random.key(seed), (rows,))
        if samples is not None:
            number = jnp.asarray(samples, jnp.int32)
            key = jnp.where(number > 0, jax.vmap(jax.random.fold_in)(key, number), key)
        return cls(
            key=key,
            temperature=fill(temperature, jnp.float32),
            top_k=fill(min(top_k, 2**31 - 1), jnp.int32) if top_k else None,
            top_p=fill(top_p, jnp.float32) if top_p < 1 else None,
            min_p=fill(min_p, jnp.float32) if min_p else None,
        )


def sample(
    logits: Float[Array, "B V"], position: Int[Array, " B"], sampling: Sampling | None
) -> Int[Array, " B"]:
    """The token that follows ``position`` in every row: the most likely one, or a sample."""
    best = jnp.argmax(logits, -1).astype(jnp.int32)
    if sampling is None:
        return best
    keys = jax.vmap(jax.random.fold_in)(sampling.key, position)
    scaled = logits / jnp.maximum(sampling.temperature, 1e-6)[:, None]
    if (sampling.top_k, sampling.top_p, sampling.min_p) == (None, None, None):
        drawn = jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)
    else:
        drawn = _sample_filtered(keys, scaled, sampling)
    return jnp.where(sampling.temperature > 0, drawn, best)


def _sample_filtered(
    keys: Key[Array, " B"], scaled: Float[Array, "B V"], sampling: Sampling
) -> Int[Array, " B"]:
    """Filters in the usual order: top-k, then top-p of what is left, then min-p."""
    order = jnp.argsort(scaled, descending=True, stable=True)
    ranked = jnp.take_along_axis(scaled, order, -1)
    if sampling.top_k is not None:
        limit = jnp.where(sampling.top_k > 0, sampling.top_k, scaled.shape[-1])
        rank = jnp.arange(scaled.shape[-1], dtype=jnp.int32)
        ranked = jnp.where(rank[None] < limit[:, None], ranked, -jnp.inf)
    mass = jax.nn.softmax(ranked, -1)
    keep = mass > 0
    if sampling.top_p is not None:
        before = jnp.cumsum(mass, -1) - mass
        keep &= before < sampling.top_p[:, None]
    if sampling.min_p is not None:
        keep &= mass >= sampling.min_p[:, None] * mass[:, :1]
    keep = keep.at[:, 0].set(True)
    drawn = jax.vmap(jax.random.categorical)(keys, jnp.where(keep, ranked, -jnp.inf))
    return jnp.take_along_axis(order, drawn[:, None], -1)[:, 0].astype(jnp.int32)
