"""Tokens drawn by lot."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from kvjax.compress.context import Context
from kvjax.sharding.across import numbers


@dataclasses.dataclass(frozen=True)
class Random:
    """The control: ``score ~ U[0, 1)``, drawn anew whenever the row has grown.

    The draw of a token depends on the seed, the layer, its row's length, its KV head and its
    position, and on nothing else, so a row does not feel its neighbours and slots may lie in any
    order. What is evicted is uniform among the tokens that are there. Starting from 0, each of
    the five numbers is hashed into a state of 32 bits, ``state = mix(state ^ mix(number + c))``,
    whose upper 24 bits are the draw (``draws``). A few integer operations a slot: the streams of
    ``jax.random`` would be compiled once a layer, at half a second each.
    """

    needs_queries: ClassVar[int] = 0
    needs_mass: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = False

    def __call__(self, ctx: Context) -> Float[Array, "B Hkv S"]:
        """Float32 scores; the highest stay."""
        head = numbers(ctx.pos.shape[1])[None, :, None]
        return draws(ctx.seed, jnp.int32(ctx.layer), ctx.length[:, None, None], head, ctx.pos)


def draws(*numbers: Int[Array, "..."]) -> Float[Array, "..."]:
    """A uniform float32 draw from [0, 1) for every combination of whole numbers, broadcast."""
    state = jnp.zeros((), jnp.uint32)
    for number in numbers:
        state = _absorb(state, number)
    return (state >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def _absorb(state: UInt[Array, "..."], number: Int[Array, "..."]) -> UInt[Array, "..."]:
    # The constant keeps numbers of 0 from being absorbed without a trace.
    hashed = _mix(number.astype(jnp.uint32) + jnp.uint32(0x9E3779B9))
    return _mix(state ^ hashed)


def _mix(bits: UInt[Array, "..."]) -> UInt[Array, "..."]:
    """The finaliser of MurmurHash3: every bit of the input reaches every bit of the output."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
