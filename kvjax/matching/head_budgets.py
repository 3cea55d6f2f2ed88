"""More tokens for the heads that need them."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.errors import UsageError
from kvjax.matching.quotas import quotas


def head_budgets(shares: Float[np.ndarray, "L Hkv"], each: int, most: int) -> Int[Array, "L Hkv"]:
    """Tokens of every KV head, in proportion to a table that was found for the model.

    Zweiger et al., 2026 (arXiv 2602.16284), find the shares by how much the loss rises when one
    head alone is compressed. No head gets less than 1 or more than ``most``; what is cut off goes
    to the others.

    Args:
        shares: of every layer and KV head, at least 0; their sum does not matter.
        each: tokens that a KV head holds on average.
        most: tokens that a KV head may hold.

    Returns:
        int32 budgets that add up to ``each`` times the number of heads.

    Raises:
        UsageError: a share is negative or not a number, all are zero, or ``each`` is not between
            1 and ``most``.
    """
    if not (np.isfinite(shares).all() and (shares >= 0).all() and shares.any()):
        raise UsageError("shares must be numbers of at least 0, and not all of them 0")
    if not 1 <= each <= most:
        raise UsageError(f"each must be between 1 and {most}, got {each}")
    flat = jnp.asarray(shares, jnp.float32).ravel()
    limits = jnp.full(flat.shape, most, jnp.int32)
    total = jnp.int32(each * len(flat))
    return jax.jit(quotas)(flat, limits, total).reshape(shares.shape)
