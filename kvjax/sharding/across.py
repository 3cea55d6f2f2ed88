"""What the devices that share a model's heads tell each other.

Each function leaves its argument as it is where a program runs on one device. Inside ``per_shard``
arrays with an axis of heads have a device's own heads alone.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

AXIS = "tp"


def inside() -> bool:
    """Whether a program for a part of the heads is being traced."""
    return AXIS in jax.sharding.get_abstract_mesh().manual_axes


def summed(x: Array) -> Array:
    """Sum of what every device has: an all-reduce."""
    return jax.lax.psum(x, AXIS) if inside() else x


def here_once(x: Array) -> Array:
    """What is to be added once to a sum: zero on all devices but the first."""
    if not inside():
        return x
    return jnp.where(jax.lax.axis_index(AXIS) == 0, x, jnp.zeros((), x.dtype))


def gathered(x: Array, axis: int) -> Array:
    """The parts of all devices, one after the other along an axis."""
    return jax.lax.all_gather(x, AXIS, axis=axis, tiled=True) if inside() else x


def own(x: Array, axis: int = 0) -> Array:
    """A device's part of what all of them have: of heads, those that are its own."""
    if not inside():
        return x
    size = x.shape[axis] // jax.lax.axis_size(AXIS)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXIS) * size, size, axis)


def numbers(count: int) -> Array:
    """int32 numbers of a device's ``count`` heads (or rows of a table) among all."""
    found = jnp.arange(count, dtype=jnp.int32)
    return found + jax.lax.axis_index(AXIS).astype(jnp.int32) * count if inside() else found
