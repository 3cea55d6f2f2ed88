"""Codes of the papers' layouts: small groups, keys along tokens and values along channels.

Arrays come as blocks ``[..., n, t, m, c]``: the ``t * c`` numbers of each of the ``n * m`` groups
share a scale. Keys have ``c = 1`` (one channel of consecutive tokens), values ``t = 1``.

A group may hold several tokens, so a number that is not finite is left out when the group's scale
and zero point are chosen, and is itself stored as something finite: it must not spoil the other
tokens. Callers refuse such numbers before they come here.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float8e4m3fn, Float16, Float32, UInt8

from pallas_kernels.scales import inverse, stored

E2M1_MAX = 6.0
_GROUP = (-3, -1)


def encode_e2m1(
    x: Float32[Array, "*b n t m c"],
) -> tuple[UInt8[Array, "*b n t m c"], Float8e4m3fn[Array, "*b n m"]]:
    """NVFP4's inner two levels: four-bit floats under a scale ``max|x| / 6`` in float8_e4m3fn.

    Rounds to nearest, ties to the even code, and saturates at 6. The format's third level, one
    float32 for a whole tensor, is left out, for a cache grows and never sees its whole tensor: a
    group reads as zeros once its largest number is below 6 * 2**-10.
    """
    x = jnp.where(jnp.isfinite(x), x, 0.0)
    scale = stored(jnp.abs(x).max(_GROUP, keepdims=True) * (1 / E2M1_MAX), jnp.float8_e4m3fn)
    size = jnp.abs(x) * inverse(scale)
    code = jnp.zeros(x.shape, jnp.uint8)
    for below, even in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        # A number halfway goes up where the code above is the even one.
        code += (size >= below if even else size > below).astype(jnp.uint8)
    return code | ((x < 0).astype(jnp.uint8) << 3), scale.squeeze(_GROUP)


def encode_ternary(
    x: Float32[Array, "*b n t m c"], rule: str
) -> tuple[UInt8[Array, "*b n t m c"], Float8e4m3fn[Array, "*b n m"]]:
    """-1, 0 or 1 under a scale in float8_e4m3fn.

    ThinKV names neither threshold nor scale, so both usual rules are here. "twn", of ternary weight
    networks (Li et al., 2016), keeps numbers above 0.7 of the group's mean size, at the mean size
    of those kept. "absmax" rounds to the nearest of 0 and the group's largest size. On groups of 16
    normal numbers the relative error is 0.42 against 0.59, with heavier tails 0.52 against 0.57.
    """
    finite = jnp.isfinite(x)
    x = jnp.where(finite, x, 0.0)
    size = jnp.abs(x)
    if rule == "absmax":
        scale = stored(size.max(_GROUP, keepdims=True), jnp.float8_e4m3fn)
        kept = size * inverse(scale) > 0.5
    else:
        kept = size > 0.7 * _mean(size, finite)
        scale = stored(_mean(size, kept), jnp.float8_e4m3fn)
    codes = jnp.where(kept, jnp.where(x < 0, 0, 2), 1)
    return codes.astype(jnp.uint8), scale.squeeze(_GROUP)


def encode_asymmetric(
    x: Float32[Array, "*b n t m c"], bits: int
) -> tuple[UInt8[Array, "*b n t m c"], Float16[Array, "*b n m"], Float16[Array, "*b n m"]]:
    """KIVI (Liu et al., 2024): codes from a zero point, the group's least number, in equal steps up
    to its largest; scale and zero point are float16."""
    finite = jnp.isfinite(x)
    least = x.min(_GROUP, keepdims=True, where=finite, initial=jnp.inf)
    most = x.max(_GROUP, keepdims=True, where=finite, initial=-jnp.inf)
    least, most = (jnp.where(jnp.isfinite(end), end, 0.0) for end in (least, most))
    top = 2**bits - 1
    zero = stored(least, jnp.float16)
    scale = stored((most - least) * (1 / top), jnp.float16)
    start = zero.astype(jnp.float32)
    steps = (jnp.where(finite, x, start) - start) * inverse(scale)
    codes = jnp.clip(jnp.round(steps), 0, top).astype(jnp.uint8)
    return codes, scale.squeeze(_GROUP), zero.squeeze(_GROUP)


def _mean(x: Array, among: Array) -> Array:
    """The mean of each group's numbers where ``among``, 0 where there are none."""
    count = among.sum(_GROUP, keepdims=True, dtype=jnp.float32)
    share = x / jnp.maximum(count, 1.0)  # first, or the sum of large numbers would overflow
    return share.sum(_GROUP, keepdims=True, where=among)
