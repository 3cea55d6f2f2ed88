"""The queries of a program, as what stands on the right of products."""

import functools

import jax.numpy as jnp

from pallas_kernels.paged_attention.hopper.lanes import THREADS
from pallas_kernels.paged_attention.hopper.plan import HEADS
from pallas_kernels.paged_attention.hopper.registers import (
    as_bits,
    as_float,
    everywhere,
    rotated,
    rounded,
)
from pallas_kernels.paged_attention.operands import ROUND, TINY, TOP


class Queries:
    """Those of one row and KV head, in the basis of one pool.

    Args:
        refs: arrays of the pool by name.
        group: query heads that share the KV head.
        scale: what multiplies their products with keys.
    """

    def __init__(self, lanes, plan, refs, row, head, group: int, scale: float):
        self.lanes, self.plan, self.refs = lanes, plan, refs
        self.row, self.head, self.group, self.scale = row, head, group, scale
        lane = lanes.thread() & 31
        self.r, self.c = lane >> 2, lane & 3

    def words(self, tile: int):
        """Words of the queries for each plane and chunk; what logits are times and plus."""
        lanes, k = self.lanes, self.plan.k
        member = tile * HEADS + (self.r >> 1)
        heads = self.refs["q"].shape[1]
        row = self.row * heads + self.head * self.group + jnp.minimum(member, self.group - 1)
        numbers = self._channels("q", row)
        offset, scale = None, self.scale
        if "mean" in self.refs:
            mean = self._channels("mean", everywhere(self.head))
            dot = functools.reduce(jnp.add, [a * b for a, b in zip(numbers, mean, strict=True)])
            for distance in (1, 2):
                dot += lanes.exchange(dot, distance)
            offset = lanes.take(dot, 8 * self.c) * jnp.float32(self.scale)
        if "balance" in self.refs:
            balance = self._channels("balance", everywhere(self.head))
            numbers = [a * b for a, b in zip(numbers, balance, strict=True)]
        if self.plan.rotated:
            numbers, scale = rotated(lanes, numbers, (1, 2)), scale * k.dim**-0.5
        numbers = [jnp.where(member < self.group, x, 0) for x in numbers]
        if k.coded:
            words, largest = self._bytes(numbers)
            # The sums of a thread are of head c, of whose queries thread 8c has the largest number.
            factor = lanes.take(largest, 8 * self.c) * jnp.float32(scale / k.unit)
        else:
            factor = jnp.full(THREADS, scale, jnp.float32)
            exact = not self.plan.rotated and "balance" not in self.refs
            words = self._exact(row, member) if exact else self._halves(numbers)
        step, many = k.chunk // 4, k.width // 16
        chunks = [words[n : n + step] for n in range(0, len(words), step)]
        planes = [chunks[n : n + many // step] for n in range(0, len(chunks), many // step)]
        return planes, factor, offset

    def _channels(self, name: str, row):
        """A row's numbers of the thread's channels, in the order of its bytes of a key."""
        found = self._stored(name, row)
        if self.refs[name].dtype.itemsize == 4:
            return [as_float(word) for word in found]
        return [as_float(x) for word in found for x in (word << 16, word & jnp.int32(-65536))]

    def _stored(self, name: str, row):
        """Words of these numbers as they are."""
        ref, k = self.refs[name], self.plan.k
        size = ref.dtype.itemsize
        at = row * (k.dim * size) + self.c * (k.run * size)
        words = min(4, k.run * size // 4)
        found = []
        for first in range(0, k.dim, 4 * k.run):
            for start in range(0, k.run * size, 4 * words):
                found += self.lanes.load(ref, at, words, first * size + start)
        return found

    def _exact(self, row, member):
        """Words of queries that are bfloat16 already, which leaves nothing over."""
        there = (member < self.group) & ~self._low
        # Not by a choice, which LLVM moves to where the words are used, and their loads with it.
        word_or_0 = jnp.where(there, 0x3210, 0x7654)
        none = jnp.zeros(THREADS, jnp.int32)
        return [self.lanes.pick(word, none, word_or_0) for word in self._stored("q", row)]

    def _bytes(self, numbers):
        """Words of fixed-point numbers of the largest one of a head, upper or lower bytes."""
        largest = functools.reduce(jnp.maximum, [jnp.abs(x) for x in numbers])
        for distance in (1, 2):
            largest = jnp.maximum(largest, self.lanes.exchange(largest, distance))
        largest = jnp.maximum(largest, TINY)
        inverse = TOP / largest
        # The upper byte of a number whose lower one is signed, or the lower one.
        fixed = [
            as_bits(self.lanes.multiply_add(x, inverse, jnp.where(self._low, ROUND, ROUND + 128)))
            for x in numbers
        ]
        byte = jnp.where(self._low, 0x40, 0x51)
        twos = [self.lanes.pick(*pair, byte) for pair in zip(fixed[::2], fixed[1::2], strict=True)]
        pairs = zip(twos[::2], twos[1::2], strict=True)
        return [self.lanes.pick(*pair, everywhere(0x5410)) for pair in pairs], largest

    def _halves(self, numbers):
        """Words of two bfloat16 each: of the numbers, or of what those leave over."""
        halves = []
        for x in numbers:
            high = rounded(x)
            halves.append(jnp.where(self._low, rounded(x - as_float(high)), high))
        pairs = zip(halves[::2], halves[1::2], strict=True)
        return [self.lanes.pick(*pair, everywhere(0x7632)) for pair in pairs]

    @property
    def _low(self):
        """Whether a column is the second one of its head."""
        return (self.r & 1) == 1
