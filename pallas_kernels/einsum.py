"""Products with a float32 result."""

import jax
import jax.numpy as jnp
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
