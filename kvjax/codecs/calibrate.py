"""A layer's key basis, out of keys that its model made of any text."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.codecs.basis import KeyBasis

SMALLEST_RANGE = 1e-3
"""Of the head's widest channel: a narrower channel counts as this wide."""


def key_basis(k: Float[Array, "T Hkv D"], *, center: bool, balance: bool) -> KeyBasis:
    """The mean of keys, and the square root of each channel's range.

    A model with a key bias has channels whose keys are all far from zero, and all alike: the mean
    takes that away. Dividing by the range's root, and multiplying queries by it, shares what is
    left of a wide channel between keys and queries; the root leaves a query's channel no wider than
    the key's was. A head's balance has the geometric mean 1. A channel that the text never moved is
    taken to be narrow but not dead, for another text may move it.

    Args:
        k: keys of one layer, rotary embedding applied, as they would be cached.
        center: whether there is to be a mean.
        balance: whether there is to be a balance; its range is that of the keys after centring.
    """
    k = k.astype(jnp.float32)
    mean = k.mean(0) if center else None
    if not balance:
        return KeyBasis(mean, None)
    width = jnp.abs(k if mean is None else k - mean[None]).max(0)
    widest = width.max(-1, keepdims=True)
    width = jnp.where(widest > 0, jnp.maximum(width, SMALLEST_RANGE * widest), 1.0)
    root = 0.5 * jnp.log(width)
    return KeyBasis(mean, jnp.exp(root - root.mean(-1, keepdims=True)))
