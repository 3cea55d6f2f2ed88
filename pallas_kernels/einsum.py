"""Products with a float32 result."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float


def einsum_float32(subscripts: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Array:
    """``jnp.einsum`` of two arrays, accumulated and returned in float32.

    Float32 operands are multiplied as such, also where a GPU would round them to TF32.
    """

    def exact(a, b):
        precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
        return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)

    if a.dtype == b.dtype == jnp.float32:
        return exact(a, b)

    # XLA's CPU backend has no batched product of bfloat16 with a float32 result.
    def widened(a, b):
        return exact(a.astype(jnp.float32), b.astype(jnp.float32))

    return jax.lax.platform_dependent(a, b, cpu=widened, default=exact)


def tile_product(
    a: Float[Array, "m k"], b: Float[Array, "k n"], interpret: bool
) -> Float[Array, "m n"]:
    """The product of two float32 tiles in a Pallas-Triton kernel, as exact as float32.

    Three products of TF32 numbers on tensor cores are as exact; the interpreter has none.
    """
    presets = jax.lax.DotAlgorithmPreset
    return plt.dot(a, b, precision=presets.F32_F32_F32 if interpret else presets.TF32_TF32_F32_X3)
