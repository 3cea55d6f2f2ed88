"""``cluster_centers`` as one Pallas-Triton launch: a program has all keys of a row and head on the
chip, and reads them once.

Which cluster a token is in is a matrix of zeros and ones. Multiplied by it, keys are summed up, and
centers picked. Zeros and ones are exact in bfloat16, and so is a float32 as three of them.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, BFloat16, Bool, Float, Float32, Int

from pallas_kernels.cluster_centers.xla import EQUAL, NOTHING
from pallas_kernels.layout import beyond_offsets

_TOKENS, _CLUSTERS, _NUMBERS = 128, 64, 128 * 128
"""The most that a program takes: tokens, clusters, and channels of all tokens together."""
_SMALL = 64 * 128  # numbers that take no more of a GPU's shared memory than all have
_LITTLE_MEMORY = ("8.6", "8.9", "12.0", "12.1")  # compute capabilities with 100 KB a program
_LEAST = 16  # rows and columns of a product


def unsupported(keys: Array, start: Array) -> str | None:
    """Why the kernel cannot cluster such keys, None where it can."""
    tokens, dim = keys.shape[2:]
    if not 0 < tokens <= _TOKENS:
        return f"a segment must have 1 to {_TOKENS} tokens, got {tokens}"
    if not 0 < len(start) <= _CLUSTERS:
        return f"there must be 1 to {_CLUSTERS} clusters, got {len(start)}"
    if dim & (dim - 1) or dim < _LEAST:
        return f"the head size must be a power of two and at least {_LEAST}, got {dim}"
    if _tile(tokens) * dim > _NUMBERS:
        return f"{tokens} tokens of {dim} channels are more than {_NUMBERS} numbers"
    if _tile(tokens) * dim > _SMALL and (device := _little_memory()):
        return f"{tokens} tokens of {dim} channels need more shared memory than {device} has"
    return beyond_offsets(keys)


def _little_memory() -> str | None:
    """The device that has too little for all that the kernel takes elsewhere, if it is one."""
    if jax.sharding.get_abstract_mesh().abstract_device is not None:
        return None  # compiled for a device that need not be there, as those that have enough
    device = jax.local_devices()[0]
    little = getattr(device, "compute_capability", None) in _LITTLE_MEMORY
    return device.device_kind if little else None


def cluster_centers_triton(
    keys: Float[Array, "B H T D"],
    start: Int[Array, " K"],
    iterations: int,
    *,
    num_warps: int | None = None,
    interpret: bool = False,
) -> tuple[Bool[Array, "B H T"], Float32[Array, "B H T"]]:
    """See ``pallas_kernels.cluster_centers``.

    To find the nearest center, keys and centers have 16 bits. All else is as exact as float32.

    Args:
        num_warps: of a program; None for eight where tokens are more than 64, and else four.

    Raises:
        NotImplementedError: the shapes are not for this kernel.
    """
    reason = unsupported(keys, start)
    if reason:
        raise NotImplementedError(f"triton cluster_centers: {reason}")
    rows, heads, tokens, _ = keys.shape
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_cluster, iterations=iterations, interpret=interpret),
        grid=(rows, heads),
        in_specs=[whole, whole],
        out_specs=[whole, whole],
        out_shape=[
            jax.ShapeDtypeStruct((rows, heads, tokens), dtype) for dtype in (jnp.bool, jnp.float32)
        ],
        compiler_params=plt.CompilerParams(num_warps=num_warps or (8 if tokens > 64 else 4)),
        interpret=interpret,
        name="cluster_centers",
    )(keys, start)


def _tile(count: int) -> int:
    return max(_LEAST, pl.next_power_of_2(count))


def _cluster(keys, start, near, apart, *, iterations, interpret):
    row, head = pl.program_id(0), pl.program_id(1)
    tokens, dim = keys.shape[2:]
    at, line, channels = (jnp.arange(n) for n in (_tile(tokens), _tile(len(start)), dim))
    inside, used = at < tokens, line < len(start)
    common = plt.load(keys.at[row, head, 0, channels]).astype(jnp.float32)[None]

    def relative(token, real):
        """Keys, but for what all have in common: that says nothing, and costs digits."""
        where = keys.at[row, head, token[:, None], channels[None]]
        real = jnp.broadcast_to(real[:, None], where.shape)
        x = plt.load(where, mask=real, other=0).astype(jnp.float32)
        return jnp.where(real, x - common, 0)

    parts = _pieces(relative(at, inside))

    def assign(centers):
        """Whether a token is in a cluster, [tokens, clusters]."""
        norm = jnp.where(used, (centers * centers).sum(1), jnp.inf)
        cluster = jnp.argmin(norm[None] - 2 * _dots(parts, _pieces(centers)), axis=1)
        return (cluster[:, None] == line[None]) & inside[:, None]

    def step(_, centers):
        member = assign(centers)
        count = member.astype(jnp.float32).sum(0)[:, None]
        mean = _picked(member.T, parts) / jnp.maximum(count, 1)
        return jnp.where(count > 0, mean, centers)

    first = relative(plt.load(start.at[line], mask=used, other=0), used)
    centers = jax.lax.fori_loop(0, iterations, step, first)
    member = assign(centers)
    if not interpret:  # else keys would be kept in registers all the while
        plt.debug_barrier()
    x = relative(at, inside)
    off = x - _picked(member, _pieces(centers))
    distance = (off * off).sum(1)
    distance = jnp.where(distance > NOTHING * (x * x).sum(1), distance, 0)
    least = jnp.where(member, distance[:, None], jnp.inf).min(0)[None]
    equal = member & (distance[:, None] <= EQUAL * least)
    earliest = jnp.where(equal, at[:, None], tokens).min(0)[None]
    chosen = (at[:, None] == earliest).astype(jnp.int32).max(1)
    plt.store(near.at[row, head, at], chosen > 0, mask=inside)
    plt.store(apart.at[row, head, at], distance, mask=inside)


def _pieces(x: Float32[Array, "n d"]) -> list[BFloat16[Array, "n d"]]:
    """Three numbers that make up each."""
    pieces = []
    for _ in range(3):
        # Rounded by hand, for XLA drops a pair of conversions.
        bits = (jax.lax.bitcast_convert_type(x, jnp.int32) + 2**15) & -(2**16)
        piece = jax.lax.bitcast_convert_type(bits, jnp.float32)
        pieces.append(piece.astype(jnp.bfloat16))
        x -= piece
    return pieces


def _dots(x, y):
    """Of rows of ``x`` and rows of ``y``, both in pieces; off by 2**-15 of what is added up."""
    return plt.dot(x[0], y[0].T) + plt.dot(x[0], y[1].T) + plt.dot(x[1], y[0].T)


def _picked(ones: Bool[Array, "m n"], x) -> Float32[Array, "m d"]:
    """Sums of those rows of ``x``, in pieces, of which ``ones`` says so; as exact as float32."""
    ones = ones.astype(jnp.bfloat16)
    return plt.dot(ones, x[0]) + plt.dot(ones, x[1]) + plt.dot(ones, x[2])
