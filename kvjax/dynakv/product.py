"""Products of float32 that are float32's on GPUs too."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_vjp
def exact_product(x: Float[Array, "*B d"], matrix: Float[Array, "d e"]) -> Float[Array, "*B e"]:
    """``x`` times ``matrix``: TF32 would already break U times its inverse.

    Its gradients make do with what GPUs take for float32 by default.
    """
    return jnp.matmul(x, matrix, precision=jax.lax.Precision.HIGHEST)


def _forward(x, matrix):
    return exact_product(x, matrix), (x, matrix)


def _backward(kept, gradient):
    x, matrix = kept
    by_matrix = x.reshape(-1, x.shape[-1]).T @ gradient.reshape(-1, gradient.shape[-1])
    return jnp.matmul(gradient, matrix.T), by_matrix


exact_product.defvjp(_forward, _backward)
