"""A fixed orthogonal rotation of the head dimension.

It spreads every channel over all others, so that a token's numbers are of similar size and one
scale serves them all. Products of rotated vectors are those of the vectors themselves.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from pallas_kernels.einsum import einsum_float32


@functools.cache
def rotation(head_dim: int) -> np.ndarray:
    """The orthogonal float32 [D, D] matrix that vectors are multiplied by from the right.

    For a power of two, Sylvester's Hadamard matrix over ``sqrt(D)``. For ``D = 2**a * m`` with an
    odd ``m``, the Kronecker product of the one for ``2**a`` and the orthonormal DCT-II of size
    ``m``, which exists for every ``m`` and whose entries are of similar size, too. The array is
    shared and cannot be written to.
    """
    odd = head_dim // (head_dim & -head_dim)
    hadamard = np.ones((1, 1))
    while hadamard.shape[0] * odd < head_dim:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    matrix = np.kron(hadamard / math.sqrt(len(hadamard)), _dct(odd)).astype(np.float32)
    matrix.flags.writeable = False
    return matrix


def _dct(size: int) -> np.ndarray:
    """The orthonormal DCT-II, one frequency a column."""
    time, frequency = np.arange(size)[:, None], np.arange(size)[None]
    waves = np.cos(np.pi * (2 * time + 1) * frequency / (2 * size))
    return waves * np.where(frequency == 0, math.sqrt(1 / size), math.sqrt(2 / size))


def rotate(x: Float[Array, "*batch D"]) -> Float32[Array, "*batch D"]:
    """``x @ rotation(D)``, in float32."""
    return _product("...d,de->...e", x)


def unrotate(x: Float[Array, "*batch D"]) -> Float32[Array, "*batch D"]:
    """What ``rotate`` made ``x`` of: ``x @ rotation(D).T``, in float32."""
    return _product("...e,de->...d", x)


def _product(subscripts: str, x: Array) -> Array:
    dim = x.shape[-1]
    exact = functools.partial(einsum_float32, subscripts)
    if dim & (dim - 1):
        return exact(x.astype(jnp.float32), jnp.asarray(rotation(dim)))
    # Hadamard's matrix has no numbers but 1 and -1, which bfloat16 and TF32 hold as well.
    signs = np.sign(rotation(dim))
    if x.dtype != jnp.float32:
        return exact(x, jnp.asarray(signs, x.dtype)) * jnp.float32(dim**-0.5)
    halves = functools.partial(in_halves, subscripts)
    found = jax.lax.platform_dependent(x, jnp.asarray(signs), cuda=halves, default=exact)
    return found * jnp.float32(dim**-0.5)


def in_halves(subscripts: str, x: Float32[Array, "..."], signs: Float32[Array, "..."]) -> Array:
    """The product of two arrays, the second one of numbers that TF32 holds, as exact as float32.

    Tensor cores take both halves of a number sooner than other cores take the whole one.
    """
    high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)
    product = functools.partial(jnp.einsum, subscripts, precision=jax.lax.Precision.HIGH)
    return product(high, signs) + product(x - high, signs)


def into_basis(
    x: Float[Array, "B Hkv T D"],
    mean: Float[Array, "Hkv D"] | None,
    balance: Float[Array, "Hkv D"] | None,
    rotated: bool,
) -> Float32[Array, "B Hkv T D"]:
    """``rotate((x - mean) / balance)``, or as much of it as there is: what is coded of ``x``."""
    x = x.astype(jnp.float32)
    if mean is not None:
        x -= mean[None, :, None]
    if balance is not None:
        x /= balance[None, :, None]
    return rotate(x) if rotated else x
