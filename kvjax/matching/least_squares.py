"""Least squares in float32, for matrices of any shape and rank."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.einsum import einsum_float32

JITTER = 1e-6
"""Added to the diagonal of a Gram matrix, as a share of its trace: what float32 needs to factor
one of any rank. It is 8 times the rounding of the largest eigenvalue, whatever the size."""
REFINEMENTS = 4
"""Steps that take the jitter's shrinkage back, where nothing is to shrink."""


def least_squares(
    a: Float[Array, "n t"], b: Float[Array, "n m"], ridge: float = 0.0
) -> Float[Array, "t m"]:
    """``argmin over x of |a x - b|^2 + ridge * sigma^2 * |x|^2``, sigma the largest singular value.

    The normal equations are factored where ``n >= t``, and their dual where ``n < t``. Without a
    ridge it is the solution of least norm, as far as float32 can tell directions from rounding:
    the factor of a slightly shifted matrix is applied again to what it leaves
    (iterated Tikhonov). A column of zeros gets 0.

    Args:
        a: float32 design.
        b: float32 targets, a column each.
        ridge: relative to the largest eigenvalue of ``a^T a``.
    """
    rows, columns = a.shape
    dual = rows < columns
    gram = einsum_float32("ni,mi->nm", a, a) if dual else einsum_float32("ni,nj->ij", a, a)
    trace = jnp.trace(gram)
    shift = jnp.maximum(jnp.float32(ridge) * largest_eigenvalue(a), JITTER * trace)
    shift = jnp.where(trace > 0, shift, 1)
    factor = jnp.linalg.cholesky(gram + shift * jnp.eye(len(gram), dtype=jnp.float32))

    def shifted(residual):
        if dual:
            return product(a.T, _solve(factor, residual))
        return _solve(factor, product(a.T, residual))

    def refine(_, x):
        return x + shifted(b - product(a, x))

    return jax.lax.fori_loop(0, 0 if ridge else REFINEMENTS, refine, shifted(b))


def _solve(factor: Float[Array, "s s"], b: Float[Array, "s m"]) -> Float[Array, "s m"]:
    half = jax.scipy.linalg.solve_triangular(factor, b, lower=True)
    return jax.scipy.linalg.solve_triangular(factor, half, lower=True, trans=1)


def product(a: Float[Array, "n t"], x: Float[Array, "t m"]) -> Float[Array, "n m"]:
    """``a x`` in float32."""
    return einsum_float32("nt,tm->nm", a, x)


def largest_eigenvalue(a: Float[Array, "n t"], steps: int = 3) -> Float[Array, ""]:
    """Of ``a^T a``, from below, by power iteration from a vector of ones; at least 1e-30.

    For a matrix without negative elements, as all are here, ones are a good start.
    """
    vector = jnp.ones((a.shape[1], 1), jnp.float32)
    for _ in range(steps):
        vector = product(a.T, product(a, vector))
        vector /= jnp.maximum(jnp.linalg.norm(vector), 1e-30)
    return jnp.maximum((product(a, vector) ** 2).sum(), 1e-30)
