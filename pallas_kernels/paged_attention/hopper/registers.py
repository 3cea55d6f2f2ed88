"""Registers of all threads: bits, and what spreads channels over all."""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.hopper.lanes import THREADS, Lanes


def everywhere(x):
    """A scalar as a register of every thread."""
    return jnp.broadcast_to(x, (THREADS,))


def as_float(word):
    """The float32 that a word is."""
    return jax.lax.bitcast_convert_type(word, jnp.float32)


def as_bits(number):
    """The word that a float32 is."""
    return jax.lax.bitcast_convert_type(number, jnp.int32)


def rounded(number):
    """The bits of the nearest number that is a bfloat16."""
    return (as_bits(number) + 0x8000) & jnp.int32(-65536)


def rotated(lanes: Lanes, numbers, distances):
    """Times Sylvester's matrix: sums and differences of what differs by a bit of its channel.

    Args:
        numbers: of a power of two of channels.
        distances: between threads whose channels differ by a bit.
    """
    bit = 1
    while bit < len(numbers):
        numbers = [
            numbers[n - bit] - x if n & bit else x + numbers[n + bit] for n, x in enumerate(numbers)
        ]
        bit *= 2
    for distance in distances:
        sign = jnp.where((lanes.thread() & distance) == 0, jnp.float32(1), jnp.float32(-1))
        numbers = [lanes.multiply_add(x, sign, lanes.exchange(x, distance)) for x in numbers]
    return numbers
