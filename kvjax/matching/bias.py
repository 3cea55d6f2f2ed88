"""How much mass each kept token stands for: non-negative least squares with a box."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.matching.least_squares import largest_eigenvalue, least_squares, product


def fit_weights(
    design: Float[Array, "n t"],
    mass: Float[Array, " n"],
    free: Bool[Array, " t"],
    bounds: tuple[float, float],
    *,
    ridge: float = 0.0,
    steps: int = 2,
    relative: bool = False,
) -> Float[Array, " t"]:
    """Weights ``w`` within bounds such that ``design w ~ mass``; 1 where not free.

    What is not free goes to the right side: ``sum over free j of design_ij w_j ~ mass_i - sum over
    the others of design_ij``. Without a ridge this is the solver of attention matching as it was
    released: least squares, clamped, then steps of projected gradient descent. With one, weights
    are drawn towards the best common one.

    Args:
        design: float32 ``exp(logit - shift)`` of the kept slots, zero where not seen.
        mass: the same, summed over all slots that a query sees.
        free: slots whose weight may change.
        bounds: lowest and highest weight.
        ridge: pull towards the common weight, relative to the largest eigenvalue of the normal
            equations; 0: none.
        steps: of projected gradient descent, without a ridge.
        relative: whether the error of a query counts as a share of its mass.
    """
    a, b = _rows(design, mass, free, relative)
    common = _common(a, b, bounds) if ridge else jnp.float32(0)
    rest = b - common * a.sum(1)
    weights = common + least_squares(a, rest[:, None], ridge)[:, 0]
    weights = jnp.clip(weights, *bounds)
    if not ridge:
        weights = descend(a, b, weights, bounds, steps)
    return jnp.where(free, weights, 1)


def fit_common_weight(
    design: Float[Array, "n t"],
    mass: Float[Array, " n"],
    free: Bool[Array, " t"],
    bounds: tuple[float, float],
    *,
    relative: bool = False,
) -> Float[Array, " t"]:
    """The same for one weight that all free slots share."""
    return jnp.where(free, _common(*_rows(design, mass, free, relative), bounds), 1)


def descend(
    a: Float[Array, "n t"],
    b: Float[Array, " n"],
    weights: Float[Array, " t"],
    bounds: tuple[float, float],
    steps: int,
) -> Float[Array, " t"]:
    """Steps of projected gradient descent on ``|a w - b|^2`` within bounds."""
    rate = 1 / largest_eigenvalue(a)

    def step(_, w):
        gradient = product(a.T, product(a, w[:, None]) - b[:, None])[:, 0]
        return jnp.clip(w - rate * gradient, *bounds)

    return jax.lax.fori_loop(0, steps, step, weights)


def _rows(design, mass, free, relative):
    """Left and right side, with columns of zeros where a slot is not free."""
    rest = mass - jnp.where(free[None], 0, design).sum(1)
    a = jnp.where(free[None], design, 0)
    if not relative:
        return a, rest
    share = 1 / jnp.maximum(mass, 1e-30)
    return a * share[:, None], rest * share


def _common(a, b, bounds):
    total = a.sum(1)
    return jnp.clip((total @ b) / jnp.maximum(total @ total, 1e-30), *bounds)
