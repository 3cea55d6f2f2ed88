"""Symmetric codes with one float16 scale a token: fp8 and integers of 8, 4 and 2 bits.

A token's channels come as parts ``[..., C]`` that lie side by side and share the scale: one part,
or several in a kernel, which cannot take a tile apart. All of this runs in a Triton kernel as well.

A token of zeros has scale 0 and reads as zeros, and so has one that is too small for float16. One
too large for it is cut to the largest number that can be stored. A NaN makes the scale of its own
token NaN, so that the token reads as NaN, and never touches another one; an infinity reads as a
large number. Nothing can be refused inside a compiled program, so callers refuse both.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float16, Float32, UInt8

from pallas_kernels.formats import middle
from pallas_kernels.scales import inverse, stored

FORMATS = ("fp8", "int8", "int4", "int2")
_FP8_MAX = 448.0
_TOP = {"int8": 127.0, "int4": 7.0, "int2": 1.5}
_FACTORS = {
    "int8": (1.0, 0.995, 0.99, 0.985),
    "int4": (1.0, 0.97, 0.94, 0.91, 0.88, 0.84, 0.8, 0.72),
    "int2": (1.0, 0.8, 0.7, 0.63, 0.56, 0.5, 0.42, 0.33),
}
"""Multiples of the scale that reaches a token's largest number. Cutting that number off to store
all others in finer steps pays with few bits: at 4 bits and 64 normal numbers the best factor is
mostly within 0.82 and 1, at 2 bits within 0.4 and 0.75, lower for more channels or longer tails.
These grids come within 1 % of the error of a hundred factors."""
_ROUND = 12582912.0  # 1.5 * 2**23: added to a float32, the sum's low bits are the nearest integer
_ROUND_BITS = 0x4B400000


def encode_uniform(
    parts: Sequence[Float32[Array, "*batch C"]], fmt: str, *, in_kernel: bool = False
) -> tuple[list[UInt8[Array, "*batch C"]], Float16[Array, "*batch 1"]]:
    """Codes, one a byte, of the nearest levels under the scale.

    For fp8 the scale is ``max|x| / 448``. For integers it is the one of least squared error among
    ``max|x| / top * factor``; ties go to the largest factor, and with factor 1 no number is more
    than half a step off.

    Args:
        in_kernel: see ``stored``.
    """
    keep = functools.partial(stored, dtype=jnp.float16, in_kernel=in_kernel)
    largest = _largest(parts)
    if fmt == "fp8":
        scale = keep(largest * (1 / _FP8_MAX))
        return [_fp8_bits(x * inverse(scale)) for x in parts], scale
    best = keep(largest * (1 / _TOP[fmt]))
    least = _squared_error(parts, best, fmt)
    for factor in _FACTORS[fmt][1:]:
        scale = keep(largest * (factor / _TOP[fmt]))
        error = _squared_error(parts, scale, fmt)
        best = jnp.where(error < least, scale, best)
        least = jnp.minimum(error, least)
    return [(_nearest(x, best, fmt) + middle(fmt)).astype(jnp.uint8) for x in parts], best


def _largest(parts) -> Array:
    def over_channels(numbers):
        return functools.reduce(jnp.maximum, numbers).max(-1, keepdims=True)

    # XLA's CPU backend and GPUs lose a NaN in a maximum.
    broken = over_channels([jnp.isnan(x).astype(jnp.float32) for x in parts])
    return jnp.where(broken > 0, jnp.nan, over_channels([jnp.abs(x) for x in parts]))


def _nearest(x: Array, scale: Array, fmt: str) -> Array:
    steps, top = x * inverse(scale), _TOP[fmt]
    if fmt == "int2":
        return jnp.clip(jnp.floor(steps) + 0.5, -top, top)
    return _round(jnp.clip(steps, -top, top)).astype(jnp.float32)


def _squared_error(parts, scale: Array, fmt: str) -> Array:
    errors = [_nearest(x, scale, fmt) * scale.astype(jnp.float32) - x for x in parts]
    return sum(error * error for error in errors).sum(-1, keepdims=True)


def _round(x: Array) -> Array:
    """The nearest integer, halves to the even one; Triton kernels have no ``jnp.round``."""
    return jax.lax.bitcast_convert_type(x + _ROUND, jnp.int32) - _ROUND_BITS


def _fp8_bits(x: Array) -> Array:
    """The nearest float8_e4m3fn, cut to its range. A cast takes instructions that A100s lack."""
    x = jnp.clip(x, -_FP8_MAX, _FP8_MAX)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    size = bits & 0x7FFFFFFF
    # Rounded to three bits of mantissa; the exponent's bias is 7 instead of 127.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = _round(jnp.abs(x) * 512.0)  # below 2**-6 all steps are 2**-9
    code = jnp.where(jnp.abs(x) < 2.0**-6, small, normal) | ((bits >> 24) & 0x80)
    return code.astype(jnp.uint8)
