"""Values that make up for the tokens that are gone."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.matching.least_squares import least_squares, product


def fit_values(
    weights: Float[Array, "n t"],
    target: Float[Array, "n D"],
    v: Float[Array, "t D"],
    free: Bool[Array, " t"],
    *,
    ridge: float = 0.0,
) -> Float[Array, "t D"]:
    """Values ``C`` with ``weights C ~ target``, those that are not free as they are.

    Args:
        weights: float32 attention over the kept slots with the biases that will be deployed.
        target: float32 outputs of attention over all slots.
        v: float32 values of the kept slots.
        free: slots whose value may change.
        ridge: pull towards ``v``, relative to the largest eigenvalue of the normal equations; 0:
            the solution of least norm, as released.
    """
    a = jnp.where(free[None], weights, 0)
    prior = v if ridge else jnp.where(free[:, None], 0, v)
    change = least_squares(a, target - product(weights, prior), ridge)
    return jnp.where(free[:, None], prior + change, v)
