"""From a gate's logits to a soft mask, and from the mask to a rank."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.dynakv.product import product


def soft_mask(logits: Float[Array, "*B d"], exact: bool = True) -> Float[Array, "*B d"]:
    """The share of the gate's probability that cuts at or behind each component.

    With q = softmax(logits) over the last component that is kept, component j gets the sum of q
    from j on. That is the paper's flipped running sum (equation 6) with the gate's outputs numbered
    from the other end. The first component is 1 exactly: it is always kept.
    """
    # A product: GPUs have no kernel for a running sum from the end, and take three passes for it.
    from_there = jnp.tri(logits.shape[-1], dtype=logits.dtype)
    behind = product(jax.nn.softmax(logits), from_there, exact)
    return jnp.concatenate([jnp.ones_like(behind[..., :1]), behind[..., 1:]], axis=-1)


def rank_of(mask: Float[Array, "*B d"], tau: float, multiple: int = 1) -> Int[Array, "*B"]:
    """Components whose mask is above ``tau``, rounded up to a multiple; at least 1."""
    rank = (mask > tau).sum(-1, dtype=jnp.int32)
    return jnp.minimum(-(-rank // multiple) * multiple, mask.shape[-1])


def prefix(rank: Int[Array, "*B"], width: int) -> Bool[Array, "*B d"]:
    """True for the first ``rank`` of ``width`` components."""
    index = jnp.arange(width, dtype=jnp.int32).reshape((1,) * rank.ndim + (width,))
    return index < rank[..., None]
