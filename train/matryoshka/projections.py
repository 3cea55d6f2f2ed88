"""Keys and values of each head behind a truncated orthogonal projection, over whole sequences."""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.dynakv.forward import plain_attention, read
from kvjax.dynakv.mask import prefix
from kvjax.dynakv.pca import moments, principal_basis
from kvjax.errors import UsageError
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder

LEVELS = 8
"""Ranks are multiples of D / 8, as in its code (16 of 128)."""

_HIGHEST = jax.lax.Precision.HIGHEST


class Projections(NamedTuple):
    """Of every layer's keys (0) and values (1), and of each KV head.

    The repository repeats keys to query heads before it stores them; here, where several query
    heads read one KV head, they share its projection, since that is what a cache holds.

    Attributes:
        u: f32[L, 2, Hkv, D, D], orthogonal; columns are components, the first of which are kept.
        mean: f32[L, 2, Hkv, D], taken off before and put back afterwards.
    """

    u: Float[Array, "L 2 H D D"]
    mean: Float[Array, "L 2 H D"]


def rank_step(config: ModelConfig) -> int:
    """Components between two ranks.

    Raises:
        UsageError: heads cannot be cut into equal parts.
    """
    if config.head_dim % LEVELS:
        raise UsageError(
            f"the model's heads have {config.head_dim} components, of which ranks cannot be "
            f"multiples of 1/{LEVELS}"
        )
    return config.head_dim // LEVELS


def principal_projections(
    model: Decoder,
    batches: Iterable[tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]],
) -> Projections:
    """Principal components of rotated keys, and of values, around their means.

    Args:
        model: the decoder.
        batches: tokens, and which of them are no padding.

    Raises:
        UsageError: there are no tokens.
        NumericalError: keys or values are not finite.
    """
    count, layers = moments(model, batches, keys="rotated")
    heads, dim = model.config.num_kv_heads, model.config.head_dim
    found = []
    for sums, products in layers:
        for part in range(2):
            blocks = products[part].reshape(heads, dim, heads, dim)
            for head, mean_sum in enumerate(sums[part].reshape(heads, dim)):
                found.append(principal_basis(count, mean_sum, blocks[head, :, head], "mean"))
    shape = (len(layers), 2, heads)
    u, mean = (np.stack(each).astype(np.float32) for each in zip(*found, strict=True))
    return Projections(*(jnp.asarray(x.reshape(*shape, *x.shape[1:])) for x in (u, mean)))


def truncated(
    x: Float[Array, "B T H D"],
    u: Float[Array, "H D D"],
    mean: Float[Array, "H D"],
    rank: Int[Array, " H"],
) -> Float[Array, "B T H D"]:
    """Keys or values out of the first ``rank`` components of each head, in float32."""
    mean = mean[None, None]
    latent = jnp.einsum("bthd,hde->bthe", x.astype(jnp.float32) - mean, u, precision=_HIGHEST)
    latent = jnp.where(prefix(rank, x.shape[-1])[None, None], latent, 0.0)
    return jnp.einsum("bthe,hde->bthd", latent, u, precision=_HIGHEST) + mean


def truncated_states(
    model: Decoder,
    projections: Projections,
    ranks: Int[Array, "L 2 H"],
    tokens: Int[Array, "B T"],
    *,
    remat: bool = False,
) -> Float[Array, "B T E"]:
    """Hidden states after the final norm, every token reading truncated keys and values.

    A query's logits with what is stored of a key, and with the mean, are together those with the
    key as it is rebuilt, and likewise for values, whose weights have the sum 1. So both are rebuilt
    here; that also holds where a sink takes part of the weights.

    Args:
        model: the decoder.
        projections: of all its heads.
        ranks: components that are kept; an array, so that other ranks compile nothing.
        tokens: rows, right-padded.
        remat: see `read`.
    """

    def attend(index, module, angles, own, q, k, v, sinks):
        del module, angles
        kept = [truncated(x, *(one[part] for one in own)) for part, x in enumerate((k, v))]
        k, v = (x.astype(q.dtype) for x in kept)
        return plain_attention(model.config, index, q, k, v, sinks), None

    beside = list(zip(*projections, ranks, strict=True))
    return read(model, tokens, attend, beside, keys="rotated", remat=remat)[0]
