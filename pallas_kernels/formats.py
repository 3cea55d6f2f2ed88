"""What stored codes say: the formats of the codes, and how they lie in bytes.

A stored number is ``levels(codes) * scale + zero``. Codes narrower than a byte are planar: with W
bytes along the packed axis, byte ``j`` holds channels ``j``, ``j + W``, ... from its low bits up.
Unpacking is then a shift and a mask of whole rows and never a shuffle within them.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8

PER_BYTE = {
    "fp8": 1,
    "int8": 1,
    "uint8": 1,
    "int4": 2,
    "uint4": 2,
    "e2m1": 2,
    "int2": 4,
    "uint2": 4,
    "ternary": 4,
}
"""Codes in a byte, of every format. "float", numbers that are stored as they are, is none of them.

* fp8: the bits of a float8_e4m3fn.
* int8, int4: symmetric, stored with 128 or 8 added; the lowest code is never written.
* int2: mid-rise, the levels -1.5, -0.5, 0.5 and 1.5; it has no zero.
* uint8, uint4, uint2: from 0 up, for a codec with a zero point.
* e2m1: the bits of a four-bit float: sign, two exponent bits, one mantissa bit.
* ternary: -1, 0 and 1, stored with 1 added; code 3 is never written.
"""

_MIDDLE = {
    "int8": 128.0,
    "int4": 8.0,
    "int2": 1.5,
    "ternary": 1.0,
    "uint8": 0.0,
    "uint4": 0.0,
    "uint2": 0.0,
}


def levels(codes: UInt8[Array, "..."], fmt: str, axis: int) -> Float32[Array, "..."]:
    """What packed codes say before scale and zero point.

    Args:
        codes: bytes, W of them along ``axis``.
        fmt: a key of ``PER_BYTE``.
        axis: the packed axis, the channels'.

    Returns:
        ``W * PER_BYTE[fmt]`` levels along ``axis``.
    """
    return code_levels(unpack(codes, fmt, axis), fmt)


def code_levels(codes: UInt8[Array, "*shape"], fmt: str) -> Float32[Array, "*shape"]:
    """What codes say, one of them a byte; only shifts, sums and selects, for use in kernels."""
    if fmt == "fp8":
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    if fmt == "e2m1":
        size = (codes & 7).astype(jnp.float32)
        size = jnp.where(size < 4, size * 0.5, jnp.where(size < 6, size - 2, size * 2 - 8))
        return jnp.where(codes > 7, -size, size)
    return codes.astype(jnp.float32) - _MIDDLE[fmt]


def middle(fmt: str) -> float:
    """The code, a whole one or not, that would say zero in a format with equal steps."""
    return _MIDDLE[fmt]


def unpack(codes: UInt8[Array, "..."], fmt: str, axis: int) -> UInt8[Array, "..."]:
    """One code a byte, out of packed ones."""
    planes = PER_BYTE[fmt]
    if planes == 1:
        return codes
    bits = 8 // planes
    return jnp.concatenate([(codes >> (bits * i)) & (2**bits - 1) for i in range(planes)], axis)


def pack(codes: UInt8[Array, "..."], fmt: str, axis: int) -> UInt8[Array, "..."]:
    """Packed codes, out of one a byte; ``PER_BYTE[fmt]`` must divide the channels."""
    return merge(jnp.split(codes, PER_BYTE[fmt], axis), fmt)


def merge(planes: Sequence[UInt8[Array, "*shape"]], fmt: str) -> UInt8[Array, "*shape"]:
    """Bytes out of their ``PER_BYTE[fmt]`` planes, one code a byte each."""
    packed, *others = planes
    for i, plane in enumerate(others, 1):
        packed = packed | (plane << (8 // PER_BYTE[fmt] * i))
    return packed
