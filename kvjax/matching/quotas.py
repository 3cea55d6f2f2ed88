"""How a budget is shared out over segments."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

POINTS, ROUNDS = 16, 7  # that a bracket is narrowed by; 17**7 is beyond float32's precision
GRID = 1024
"""Remainders are told apart by one part in so many; what is closer is equal, but for rounding."""


def quotas(
    shares: Float[Array, " m"], available: Int[Array, " m"], total: Int[Array, ""]
) -> Int[Array, " m"]:
    """Whole numbers in proportion to shares that add up to ``min(total, sum of available)``.

    ``x_i = clip(c * share_i, 1, available_i)``, with the one ``c`` for which they add up; then
    whole numbers by largest remainder, the first of equal ones first. Where no limit is met this
    is ``total * share_i / sum of shares``. If there are more segments than ``total``, only that
    many of them, those with the largest shares, have 1 as their least.

    Args:
        shares: at least 0.
        available: the most that each may get; where it is 0 there is no segment.
        total: what is shared out.
    """
    there = available > 0
    total = jnp.minimum(jnp.maximum(total, 0), available.sum())
    shares = jnp.where(there, shares, 0)
    shares = shares / jnp.maximum(shares.max(), 1e-30)
    shares = jnp.where(there, jnp.maximum(shares, 1e-6), 0)  # or what is left might find no taker
    least = (there & (_rank(-shares) < total)).astype(jnp.int32)
    low, high = least.astype(jnp.float32), available.astype(jnp.float32)

    def at(log_factor):
        return jnp.clip(jnp.exp(log_factor)[..., None] * shares[None], low[None], high[None])

    # Many points at a time: on a GPU a round takes as long as its few launches.
    bounds = jnp.log(jnp.float32(1e-9)), jnp.log(1e6 * jnp.float32(max(len(shares), 2)) ** 2)
    for _ in range(ROUNDS):
        points = jnp.linspace(*bounds, POINTS + 2)
        below = at(points[1:-1]).sum(-1) <= total.astype(jnp.float32)
        last = below.sum(dtype=jnp.int32)
        bounds = points[last], points[last + 1]
    # To full precision, now that it is known which limits are met.
    found = jnp.exp(bounds[1]) * shares
    free = (found > low) & (found < high)
    limits = jnp.clip(found, low, high)
    rest = total.astype(jnp.float32) - jnp.where(free, 0, limits).sum()
    exact = jnp.where(free, rest / jnp.where(free, shares, 0).sum() * shares, limits)
    exact = jnp.clip(exact, low, high)
    whole = jnp.floor(exact).astype(jnp.int32)
    remainder = jnp.where(whole < available, exact - whole.astype(jnp.float32), -1)
    remainder = jnp.round(remainder * GRID)
    return whole + (_rank(-remainder) < total - whole.sum()).astype(jnp.int32)


def _rank(keys: Float[Array, " m"]) -> Int[Array, " m"]:
    place = jnp.arange(len(keys), dtype=jnp.int32)
    return place.at[jnp.argsort(keys, stable=True)].set(place)
