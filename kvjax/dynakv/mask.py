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


def rank_of_logits(logits: Float[Array, "*B d"], tau: float, multiple: int = 1) -> Int[Array, "*B"]:
    """``rank_of(soft_mask(logits), tau, multiple)``, without the mask, but for ties with ``tau``.

    Masks fall from component to component, so that a multiple is kept if its first one is.
    """
    width = logits.shape[-1]
    share = jax.nn.softmax(logits)
    share = jnp.pad(share, [(0, 0)] * (share.ndim - 1) + [(0, -width % multiple)])
    share = share.reshape(*share.shape[:-1], -1, multiple).sum(-1)
    place = jnp.arange(share.shape[-1], dtype=jnp.int32)
    at_or_behind = place[:, None] <= place[None]
    at_or_behind = at_or_behind.reshape((1,) * (share.ndim - 1) + at_or_behind.shape)
    behind = jnp.where(at_or_behind, share[..., None, :], 0.0).sum(-1)
    count = 1 + (behind[..., 1:] > tau).sum(-1, dtype=jnp.int32)  # the first is always kept
    return jnp.minimum(count * multiple, width)


def prefix(rank: Int[Array, "*B"], width: int) -> Bool[Array, "*B d"]:
    """True for the first ``rank`` of ``width`` components."""
    index = jnp.arange(width, dtype=jnp.int32).reshape((1,) * rank.ndim + (width,))
    return index < rank[..., None]
