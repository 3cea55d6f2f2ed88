"""Symmetric codes with one float16 scale for a block: fp8 and integers of 8, 4 and 2 bits.

Arrays come as blocks ``[..., n, t, m, c]``: the ``t * c`` numbers of each of the ``n * m`` blocks
share a scale. These codecs use a block for each token, with all channels of a head in it.

A block of zeros has scale 0 and reads as zeros, and so has one that is too small for float16. One
too large for it is cut to the largest number that can be stored. A NaN makes the scale of its own
block NaN, so that the block reads as NaN, and never touches another one; an infinity reads as a
large number. Nothing can be refused inside a compiled program, so callers refuse both.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float16, Float32, UInt8

from kvjax.codecs.scales import inverse, stored
from pallas_kernels.formats import middle

FP8_MAX = 448.0
_BLOCK = (-3, -1)
_TOP = {"int8": 127.0, "int4": 7.0, "int2": 1.5}
_FACTORS = {
    "int8": (1.0, 0.995, 0.99, 0.985),
    "int4": (1.0, 0.97, 0.94, 0.91, 0.88, 0.84, 0.8, 0.72),
    "int2": (1.0, 0.8, 0.7, 0.63, 0.56, 0.5, 0.42, 0.33),
}
"""Multiples of the scale that reaches a block's largest number. Cutting that number off to store
all others in finer steps pays with few bits: at 4 bits and 64 normal numbers the best factor is
mostly within 0.82 and 1, at 2 bits within 0.4 and 0.75, lower for more channels or longer tails.
These grids come within 1 % of the error of a hundred factors."""


def encode_fp8(
    x: Float32[Array, "*b n t m c"],
) -> tuple[UInt8[Array, "*b n t m c"], Float16[Array, "*b n m"]]:
    """The bits of ``x / scale`` in float8_e4m3fn, where ``scale = max|x| / 448``."""
    scale = stored(_largest(x) * (1 / FP8_MAX), jnp.float16)
    # The cast does not saturate: what is above the largest number by half a step becomes NaN.
    numbers = jnp.clip(x * inverse(scale), -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn)
    return jax.lax.bitcast_convert_type(numbers, jnp.uint8), scale.squeeze(_BLOCK)


def encode_int(
    x: Float32[Array, "*b n t m c"], fmt: str
) -> tuple[UInt8[Array, "*b n t m c"], Float16[Array, "*b n m"]]:
    """Nearest levels under the scale of least squared error among ``max|x| / top * factor``.

    Ties go to the largest factor; with factor 1 no number is more than half a step off.
    """
    largest = _largest(x)
    best = stored(largest * (1 / _TOP[fmt]), jnp.float16)
    least = _squared_error(x, best, fmt)
    for factor in _FACTORS[fmt][1:]:
        scale = stored(largest * (factor / _TOP[fmt]), jnp.float16)
        error = _squared_error(x, scale, fmt)
        best = jnp.where(error < least, scale, best)
        least = jnp.minimum(error, least)
    codes = _nearest(x, best, fmt) + middle(fmt)
    return codes.astype(jnp.uint8), best.squeeze(_BLOCK)


def _largest(x: Array) -> Array:
    # XLA's CPU backend may lose a NaN in a maximum.
    broken = jnp.isnan(x).any(_BLOCK, keepdims=True)
    return jnp.where(broken, jnp.nan, jnp.abs(x).max(_BLOCK, keepdims=True))


def _nearest(x: Array, scale: Array, fmt: str) -> Array:
    steps = x * inverse(scale)
    level = jnp.floor(steps) + 0.5 if fmt == "int2" else jnp.round(steps)
    return jnp.clip(level, -_TOP[fmt], _TOP[fmt])


def _squared_error(x: Array, scale: Array, fmt: str) -> Array:
    error = _nearest(x, scale, fmt) * scale.astype(jnp.float32) - x
    return (error * error).sum(_BLOCK, keepdims=True)
