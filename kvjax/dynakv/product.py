"""Products of float32 that are as exact as what is multiplied, on GPUs too."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_PARTS = 64
"""Into so many parts a sum over tokens is cut, if there are not more rows: what comes out of it, a
matrix, is too small for a GPU."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(
    x: Float[Array, "*B d"], matrix: Float[Array, "d e"], exact: bool = True
) -> Float[Array, "*B e"]:
    """``x`` times ``matrix``.

    Args:
        x: of many tokens.
        matrix: for all of them.
        exact: in float32 proper, for TF32 would already break U times its inverse. Otherwise, and
            for gradients, with what GPUs take for float32 by default: enough for a model in
            bfloat16, whose keys and values are rounded to an eighth of that anyway.
    """
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    return jnp.matmul(x, matrix, precision=precision)


def _forward(x, matrix, exact):
    return product(x, matrix, exact), (x, matrix)


def _backward(exact, kept, gradient):
    del exact
    x, matrix = kept
    return jnp.matmul(gradient, matrix.T), _over_tokens(x, gradient)


def _over_tokens(x: Float[Array, "*B d"], y: Float[Array, "*B e"]) -> Float[Array, "d e"]:
    """The sum over tokens of the outer products of x and y.

    Parts are of single rows, which devices may share.
    """
    *rows, tokens, _ = x.shape
    parts = math.gcd(tokens, max(_PARTS // math.prod(rows), 1))
    x, y = (one.reshape(*rows, parts, -1, one.shape[-1]) for one in (x, y))
    each = jax.lax.optimization_barrier(jnp.einsum("...nd,...ne->...de", x, y))
    return each.sum(range(len(rows) + 1))  # without a barrier they are one product again


product.defvjp(_forward, _backward)
