"""The operations that a model is made of, with weights laid out as in Hugging Face's."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.sharding.across import gathered, here_once, numbers, summed


def precision(dtype: DTypeLike) -> jax.lax.Precision | None:
    """Ask for true float32 products of float32 models, which GPUs would otherwise round to TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def linear(
    x: Float[Array, "*B K"],
    weight: Float[Array, "*N K"],
    bias: Float[Array, "*N"] | None = None,
    *,
    dtype: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """Contract the last axes of ``x`` and ``weight``.

    The weight is read as a plain matrix: with more than one output axis XLA transposes a copy of
    it at every call, while ``[N, K]`` is read where it lies.

    Args:
        dtype: of the result, by default that of ``x``; the accumulation is in float32 either way.
    """
    rows = x.reshape(-1, x.shape[-1])
    matrix = weight.reshape(-1, weight.shape[-1])
    out = _product(rows, matrix, dtype or x.dtype)
    out = out.reshape(*x.shape[:-1], *weight.shape[:-1])
    if bias is None:
        return out
    return out + bias.reshape((1,) * (x.ndim - 1) + bias.shape).astype(out.dtype)


def row_parallel(
    x: Float[Array, "*B K"], weight: Float[Array, "N K"], bias: Float[Array, " N"] | None = None
) -> Float[Array, "*B N"]:
    """``linear`` where devices share what is contracted: each has a term of the sum."""
    return summed(linear(x, weight, None if bias is None else here_once(bias)))


def embedded(
    table: Float[Array, "V E"], tokens: Int[Array, "*B"], vocab_size: int
) -> Float[Array, "*B E"]:
    """The tokens' rows of a table, of which a device may have a part."""
    if len(table) == vocab_size:
        return table[tokens]
    place = tokens - numbers(len(table))[0]
    here = (place >= 0) & (place < len(table))
    return summed(jnp.where(here[..., None], table[jnp.clip(place, 0, len(table) - 1)], 0))


def logits_of(
    hidden: Float[Array, "*B E"], head: Float[Array, "V E"], vocab_size: int
) -> Float[Array, "*B W"]:
    """Float32 scores of all tokens, of which a device may have the rows of some."""
    found = linear(hidden, head, dtype=jnp.float32)
    return found if len(head) == vocab_size else gathered(found, found.ndim - 1)


def _product(
    x: Float[Array, "M K"], matrix: Float[Array, "N K"], dtype: DTypeLike
) -> Float[Array, "M N"]:
    def product(x, matrix):
        return jax.lax.dot_general(
            x,
            matrix,
            (((1,), (1,)), ((), ())),
            precision=precision(x.dtype),
            preferred_element_type=dtype,
        )

    if x.shape[0] > 1 or x.dtype == jnp.float32:
        return product(x, matrix)

    # With a single bfloat16 row, XLA's CPU backend first widens a copy of the whole matrix, which
    # takes ten times as long as two rows do.
    def with_a_second_row(x, matrix):
        return product(jnp.pad(x, ((0, 1), (0, 0))), matrix)[:1]

    return jax.lax.platform_dependent(x, matrix, cpu=with_a_second_row, default=product)


def rms_norm(
    x: Float[Array, "*B E"], weight: Float[Array, " E"], eps: float
) -> Float[Array, "*B E"]:
    """Divide by the root mean square, in float32."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    scale = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
    return (normed * scale).astype(x.dtype)
