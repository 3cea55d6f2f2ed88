"""Pages as the left side of a product, inside a Triton kernel.

Integer codes are multiplied as they are: shifted to the top of a signed byte each, four bytes an
instruction, and then by the tensor cores' product of bytes. What stands on the right, queries or
weights, is 16-bit fixed point of its column's largest number, as two bytes: finer than bfloat16.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.formats import PER_BYTE

NEG_INF = -1e30  # the logit of a free slot: finite, so that nothing becomes NaN
LOWEST = -1e29  # where the top logit starts: far above a free slot's, which so gets weight zero

TOP = 32512.0  # the largest number whose two signed bytes are both in range
ROUND = 12582912.0  # 1.5 * 2**23: added to a float32, the sum's low bits are the nearest integer
TINY = 1e-30

# Plane p of a byte is ((byte << left - bits * p) & mask) ^ flip, a signed byte that says
# level * unit.
INTEGERS = {
    "int8": (0, 0xFF, 0x80, 1.0),
    "int4": (4, 0xF0, 0x80, 16.0),
    "int2": (6, 0xC0, 0xA0, 64.0),
}
FORMATS = ("float", "fp8", *INTEGERS)
_FP8_UNIT = 1 / 256  # an e4m3's bits, moved to where a float16 has them, say so much of it


@dataclasses.dataclass(frozen=True)
class Place:
    """Slots that are read at a time: of one page, or of each of several."""

    pages: jax.Array
    slots: jax.Array

    def vector(self, ref):
        """A number a slot."""
        if self.pages.ndim == 0:
            return ref[self.pages, self.slots]
        return ref[self.pages[:, None], self.slots[None]].reshape(-1)

    def rows(self, ref, channels, there):
        """A tile of keys, [slots, channels]; zero where ``there`` says that there is none."""
        if self.pages.ndim == 0:
            return _load(ref.at[self.pages, self.slots[:, None], channels[None]], there, 0)
        at = ref.at[self.pages[:, None, None], self.slots[None, :, None], channels[None, None]]
        return _load(at, there, (0, 1)).reshape(-1, channels.size)

    def columns(self, ref, channels, there):
        """A tile of values, [channels, slots]; likewise."""
        if self.pages.ndim == 0:
            return _load(ref.at[self.pages, channels[:, None], self.slots[None]], there, 1)
        at = ref.at[self.pages[None, :, None], channels[:, None, None], self.slots[None, None]]
        return _load(at, there, (1, 2)).reshape(channels.size, -1)


def _load(at, there, axes):
    if there is None:
        return plt.load(at)
    return plt.load(at, mask=jnp.expand_dims(there, axes), other=0)


@dataclasses.dataclass(frozen=True)
class Side:
    """Keys or values of one format.

    Attributes:
        dim: channels of a head.
        dtype: of the stored array.
        interpret: whether there is no inline assembly.
    """

    fmt: str
    dim: int
    dtype: jnp.dtype
    interpret: bool

    @property
    def planes(self) -> int:
        return PER_BYTE.get(self.fmt, 1)

    @property
    def narrowest(self) -> int:
        """The least columns of queries that a product takes."""
        return 4 if self.fmt in INTEGERS else 8

    @property
    def width(self) -> int:
        return self.dim // self.planes

    @property
    def padded(self) -> int:
        """Stored channels of a tile: a power of two, as much as a product takes."""
        least = 32 if self.fmt in INTEGERS else 16
        return max(least, pl.next_power_of_2(self.width))

    def channels(self):
        """For each plane, the channels of its tile; beyond ``dim`` where there is none."""
        stored = jnp.arange(self.padded)
        there = stored < self.width
        return [
            jnp.where(there, stored + plane * self.width, self.dim) if self.padded != self.width
            else stored + plane * self.width
            for plane in range(self.planes)
        ]  # fmt: skip

    def start(self, columns: int):
        return (jnp.zeros((self.padded, columns), jnp.float32),) * self.planes

    def stored(self):
        """Stored channels of a tile, and which of them there are if not all."""
        stored = jnp.arange(self.padded)
        return stored, None if self.padded == self.width else stored < self.width


class Numbers(Side):
    """Numbers that are stored as they are."""

    def queries(self, query, scale):
        (channels,) = self.channels()
        return query(channels).astype(self.dtype), jnp.float32(scale)

    def times_query(self, ref, place, query, _, bias):
        q, factor = query
        logits = _fma(self._dot(place.rows(ref, *self.stored()), q), factor, bias, self.interpret)
        return jnp.where(bias > LOWEST, logits, bias)  # free slots may hold anything finite

    def add_weighted(self, ref, place, weights, sums, fade):
        (out,) = sums
        new = self._dot(place.columns(ref, *self.stored()), weights.astype(self.dtype))
        return (_fma(out, fade[None], new, self.interpret),)

    def _dot(self, a, b):
        # Float32 products of float32 operands, which the hardware would round to TF32.
        exact = jax.lax.DotAlgorithmPreset.F32_F32_F32
        return plt.dot(a, b, precision=exact if self.dtype == jnp.float32 else None)


class Codes(Side):
    """Codes with a scale a slot."""

    def queries(self, query, scale):
        parts = [query(channels) for channels in self.channels()]
        largest = _largest(parts)
        return [self._right(part, 1 / largest) for part in parts], self._factor(largest) * scale

    def times_query(self, ref, place, query, k_scale, bias):
        q, factor = query
        tile = place.rows(ref, *self.stored())
        dots = sum(self._dots(tile, right, plane) for plane, right in enumerate(q))
        return _fma(self._sum(dots), factor[None] * k_scale[:, None], bias, self.interpret)

    def add_weighted(self, ref, place, weights, sums, fade):
        tile = place.columns(ref, *self.stored())
        largest = _largest([weights])
        right, factor = self._right(weights, 1 / largest), self._factor(largest)[None]
        return tuple(
            _fma(
                out, fade[None], self._sum(self._dots(tile, right, plane)) * factor, self.interpret
            )
            for plane, out in enumerate(sums)
        )

    def _right(self, x, inverse):
        """What stands on the right for float32 numbers, the two bytes of each side by side."""
        if self.fmt == "fp8":
            return (x * inverse[None]).astype(jnp.float16)
        moved = _fma(x, inverse[None] * TOP, ROUND, self.interpret)
        bits = jax.lax.bitcast_convert_type(moved, jnp.int32)
        pair = ((bits + 128) >> 8).astype(jnp.int8), bits.astype(jnp.int8)
        return jnp.stack(pair, -1).reshape(x.shape[0], -1)

    def _factor(self, largest):
        unit = _FP8_UNIT if self.fmt == "fp8" else INTEGERS[self.fmt][3] * TOP
        return largest * (1 / unit)

    def _dots(self, tile, right, plane):
        return plt.dot(self._half(tile) if self.fmt == "fp8" else self._bytes(tile, plane), right)

    def _sum(self, dots):
        """Products in float32, out of those of the two bytes."""
        if self.fmt == "fp8":
            return dots
        high, low = jnp.unstack(dots.reshape(dots.shape[0], -1, 2), axis=-1)
        return (high * 256 + low).astype(jnp.float32)

    def _bytes(self, tile, plane):
        left, mask, flip, _ = INTEGERS[self.fmt]
        left -= 8 // self.planes * plane
        if self.interpret:
            moved = ((tile << left) & jnp.uint8(mask)) ^ jnp.uint8(flip)
            return jax.lax.bitcast_convert_type(moved, jnp.int8)
        mask, flip = (f"0x{byte:02x}{byte:02x}{byte:02x}{byte:02x}" for byte in (mask, flip))
        move = f"shl.b32 $0, $1, {left}; lop3.b32 $0, $0" if left else "lop3.b32 $0, $1"
        return _assembly(f"{move}, {mask}, {flip}, 0x6a;", "=r,r", 4, jnp.int8, tile)

    def _half(self, tile):
        """Codes of fp8 as float16, in units of ``_FP8_UNIT``."""
        if self.interpret:
            number = jax.lax.bitcast_convert_type(tile, jnp.float8_e4m3fn)
            return number.astype(jnp.float16) * jnp.float16(_FP8_UNIT)
        # Two bytes to the tops of two halves; exponent and mantissa one bit down, the sign stays.
        half = "prmt.b32 x, $2, 0, {bytes}; and.b32 y, x, 0x7f007f00; shr.b32 y, y, 1; "
        half += "lop3.b32 {out}, x, 0x80008000, y, 0xea; "
        code = "{ .reg .b32 x, y; "
        code += half.format(bytes="0x1404", out="$0") + half.format(bytes="0x3424", out="$1")
        return _assembly(code + "}", "=r,=r,r", 4, jnp.float16, tile)


def _largest(parts):
    """The largest absolute number of each column."""
    tops = [jnp.abs(part).max(0) for part in parts]
    for top in tops[1:]:
        tops[0] = jnp.maximum(tops[0], top)
    return jnp.maximum(tops[0], TINY)


def _fma(a, b, c, interpret):
    """``a * b + c``; XLA has Triton round twice where it is not asked for one instruction."""
    if interpret:
        return a * b + c
    args = [jnp.broadcast_to(x, a.shape).astype(jnp.float32) for x in (a, b, c)]
    return _assembly("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", 1, jnp.float32, *args)


def _assembly(code, constraints, pack, dtype, *args):
    """Inline PTX over ``pack`` numbers at a time."""
    result = jax.ShapeDtypeStruct(args[0].shape, dtype)
    (out,) = plt.elementwise_inline_asm(
        code, args=args, constraints=constraints, pack=pack, result_shape_dtypes=[result]
    )
    return out
