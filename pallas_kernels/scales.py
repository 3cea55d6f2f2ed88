"""Scales as they are stored: rounded to the type that is kept, and never infinite.

Encoders work with the rounded scale, because that is the one a reader multiplies by.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32


def stored(
    number: Float32[Array, "*shape"], dtype: DTypeLike, *, in_kernel: bool = False
) -> Float[Array, "*shape"]:
    """``number`` in ``dtype``, cut to its finite range; a cast alone would give inf or NaN.

    Args:
        in_kernel: of Pallas, which rounds where it is told to and knows no barrier.
    """
    top = float(jnp.finfo(dtype).max)
    # XLA's CPU backend may lose a NaN in a minimum or maximum.
    rounded = jnp.where(jnp.isnan(number), number, jnp.clip(number, -top, top)).astype(dtype)
    # For a GPU, XLA makes nothing of a number that is narrowed and then widened again.
    return rounded if in_kernel else jax.lax.optimization_barrier(rounded)


def inverse(scale: Float[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """``1 / scale`` in float32, and 0 where the scale is 0: what it scales is then stored as 0."""
    scale = scale.astype(jnp.float32)
    return jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1.0), 0.0)
