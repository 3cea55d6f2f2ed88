"""Neighbours: tokens that follow each other among those that a KV head still holds."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.compress.context import Context
from kvjax.errors import UsageError


def position_rank(ctx: Context) -> Int[Array, "B Hkv S"]:
    """A slot's place in the order of positions, from 0; slots without a token come last."""
    last = jnp.iinfo(ctx.pos.dtype).max
    order = jnp.argsort(jnp.where(ctx.live, ctx.pos, last), axis=2)
    return jnp.argsort(order, axis=2)


def pool(
    values: Float[Array, "B Hkv S"],
    rank: Int[Array, "B Hkv S"],
    kernel: int,
    kind: Literal["average", "max"],
) -> Float[Array, "B Hkv S"]:
    """Pool every slot with the ``kernel // 2`` neighbours on either side of it.

    Args:
        values: at least 0; 0 at slots without a token.
        rank: from ``position_rank``.
        kernel: odd. Beyond the first and the last token there are zeros, which the average counts.
        kind: what to take of the ``kernel`` values.
    """
    ordered = jnp.put_along_axis(jnp.zeros_like(values), rank, values, axis=2, inplace=False)
    combine = jax.lax.add if kind == "average" else jax.lax.max
    pooled = jax.lax.reduce_window(ordered, 0.0, combine, (1, 1, kernel), (1, 1, 1), "SAME")
    if kind == "average":
        pooled = pooled / kernel
    return jnp.take_along_axis(pooled, rank, axis=2)


def check_kernel(kernel: int) -> None:
    """Refuse a kernel that has no middle.

    Raises:
        UsageError: it is even or below 1.
    """
    if kernel < 1 or kernel % 2 == 0:
        raise UsageError(f"kernel must be an odd number of neighbours, got {kernel}: try 5 or 7")
