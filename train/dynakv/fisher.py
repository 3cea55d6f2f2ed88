"""How Palu shares out ranks: by the Fisher information of the weights that make keys and values."""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kvjax.dynakv.settings import SpectralSettings
from kvjax.dynakv.spectrum import key_width
from kvjax.errors import NumericalError
from kvjax.matching.quotas import quotas
from kvjax.models.decoder import Decoder
from kvjax.train.dynakv.loss import plain_cross_entropy


def fisher_ranks(
    model: Decoder,
    batches: Iterable[tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]],
    settings: SpectralSettings,
) -> SpectralSettings:
    """Settings whose ranks, of the same sum, are in proportion to Fisher information.

    As Palu's ``fisher_uniform`` with one group of all heads (arXiv 2407.21118, its repository's
    ``rank_search.py``): keys and values of all layers compete for one budget. Its labels are
    shifted twice, so that its loss predicts the token after the next; that is not repeated here.

    Args:
        model: the decoder.
        batches: tokens, and which of them are no padding; each row is a sample.
        settings: with a fixed gate; its ranks, for each layer, make the budget, and ranks are
            multiples of ``rank_multiple``.

    Raises:
        NumericalError: a gradient is not finite.
    """
    scores = fisher_scores(model, batches)
    if not np.isfinite(scores).all():
        raise NumericalError("a gradient is not finite: ranks cannot be shared out by it")
    layers, multiple = len(scores), settings.rank_multiple
    width = key_width(model.config)
    budget = layers * (settings.key_rank + settings.value_rank) // multiple
    most = np.full(scores.size, width // multiple, np.int32)
    found = quotas(jnp.asarray(scores.ravel()), jnp.asarray(most), jnp.int32(budget))
    ranks = multiple * np.asarray(found).reshape(layers, 2)
    keys, values = (tuple(part.tolist()) for part in ranks.T)
    return dataclasses.replace(settings, key_rank=keys, value_rank=values)


def fisher_scores(
    model: Decoder, batches: Iterable[tuple[np.ndarray, np.ndarray]]
) -> Float[np.ndarray, "L 2"]:
    """Of each layer's key and value projection, the mean over its weights of the root of the mean
    over samples of the squared gradient of the cross-entropy."""
    graph, weights, rest = nnx.split(model, _makes_heads, ...)
    total, count = None, 0
    for tokens, valid in batches:
        for row in range(len(tokens)):
            found = _squares(graph, weights, rest, tokens[row][None], valid[row][None])
            total = found if total is None else jax.tree.map(jnp.add, total, found)
            count += 1
    leaves = jax.tree.leaves(total)
    parts = [jnp.sqrt(leaf / count)[:, -2:].mean((0, 2, 3)) for leaf in leaves]
    return np.stack(jax.device_get(parts))


def _makes_heads(path: tuple, variable: nnx.Variable) -> bool:
    return path[-1] == "qkv"


@jax.jit(static_argnums=0)
def _squares(graph, weights, rest, tokens: Array, valid: Array):
    """Each layer's squared gradients, float32 [Hkv, G + 2, D, E]."""

    def loss(weights):
        nats, predicted = plain_cross_entropy(nnx.merge(graph, weights, rest), tokens, valid)
        return nats / predicted

    squares = jax.tree.map(
        lambda leaf: jnp.square(leaf.astype(jnp.float32)), jax.grad(loss)(weights)
    )
    return [layer["attn"]["qkv"][...] for _, layer in sorted(squares["layers"].items())]
