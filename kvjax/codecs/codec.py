"""How one tensor, and how keys and values together, are stored."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Shaped

from kvjax.codecs.grouped import encode_asymmetric, encode_e2m1, encode_ternary
from kvjax.errors import UsageError
from pallas_kernels.formats import PER_BYTE, levels, pack
from pallas_kernels.uniform import FORMATS, encode_uniform


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
    """Stored numbers: ``levels(codes) * scale + zero``.

    Attributes:
        codes: uint8, packed along the channels; numbers themselves for the format "float".
        scale: one for ``T / n`` consecutive tokens and ``D / m`` consecutive channels; None where
            numbers are stored as they are.
        zero: what is added after scaling, or None.
    """

    codes: Shaped[Array, "*batch T W"]
    scale: Float[Array, "*batch n m"] | None
    zero: Float[Array, "*batch n m"] | None


@dataclasses.dataclass(frozen=True)
class Codec:
    """How one tensor, keys or values, is stored.

    Attributes:
        fmt: format of the codes, a name of ``pallas_kernels.formats``, or "float": numbers are
            stored as they are, in whatever dtype they have.
        bits: of a code; 16 for "float".
        tokens: consecutive tokens that share a scale.
        channels: consecutive channels that share it; None: all of the head.
        scale_dtype: what scales are stored in; None for "float".
        zero: whether there is a zero point, with the shape and dtype of the scale.
        ternary_rule: how "ternary" chooses threshold and scale, see ``encode_ternary``.
    """

    name: str
    fmt: str
    bits: int
    tokens: int = 1
    channels: int | None = None
    scale_dtype: np.dtype | None = None
    zero: bool = False
    ternary_rule: str = "twn"

    @property
    def uniform(self) -> bool:
        """Whether codes have one scale a token and no zero point."""
        return self.fmt in FORMATS

    def width(self, head_dim: int) -> int:
        """Bytes of a token's codes, or channels of a token for "float".

        Raises:
            UsageError: if a head of this size cannot be divided into groups and whole bytes.
        """
        self._check(head_dim)
        return head_dim if self.fmt == "float" else head_dim // PER_BYTE[self.fmt]

    def payload_bits(self, head_dim: int) -> float:
        """Codes, scales and zero points: bits for one channel of one token.

        For "float" those of bfloat16; a float32 model stores 32.
        """
        self._check(head_dim)
        if self.scale_dtype is None:
            return float(self.bits)
        sharing = self.tokens * (self.channels or head_dim)
        return self.bits + 8 * self.scale_dtype.itemsize * (1 + self.zero) / sharing

    def encode(self, x: Float[Array, "*batch T D"]) -> Encoded:
        """Store ``x``. It must be finite: see ``pallas_kernels.uniform`` and ``grouped`` for what
        becomes of it otherwise.

        Raises:
            ValueError: if T does not fill the last group of tokens: a group that is stored with
                some of its tokens missing would get the scale of those alone.
            UsageError: as ``width`` does.
        """
        if self.fmt == "float":
            return Encoded(x, None, None)
        if self.uniform:
            self._check(x.shape[-1])
            (codes,), scale = encode_uniform((x.astype(jnp.float32),), self.fmt)
            return Encoded(pack(codes, self.fmt, -1), scale, None)
        blocks = self._blocks(x.astype(jnp.float32))
        zero = None
        match self.fmt:
            case "e2m1":
                codes, scale = encode_e2m1(blocks)
            case "ternary":
                codes, scale = encode_ternary(blocks, self.ternary_rule)
            case _:
                codes, scale, zero = encode_asymmetric(blocks, self.bits)
        return Encoded(pack(codes.reshape(x.shape), self.fmt, -1), scale, zero)

    def decode(self, stored: Encoded) -> Float32[Array, "*batch T D"]:
        """The numbers that ``stored`` stands for."""
        if self.fmt == "float":
            return stored.codes.astype(jnp.float32)
        plain = levels(stored.codes, self.fmt, -1)
        blocks = self._blocks(plain) * _beside_blocks(stored.scale)
        if self.zero:
            blocks += _beside_blocks(stored.zero)
        return blocks.reshape(plain.shape)

    def _blocks(self, x: Float32[Array, "*batch T D"]) -> Float32[Array, "*batch n t m c"]:
        *batch, tokens, dim = x.shape
        self._check(dim)
        if tokens % self.tokens:
            raise ValueError(f"{self.name} stores {self.tokens} tokens at a time, got {tokens}")
        channels = self.channels or dim
        return x.reshape(*batch, tokens // self.tokens, self.tokens, dim // channels, channels)

    def _check(self, head_dim: int) -> None:
        for number, what in (
            (PER_BYTE.get(self.fmt, 1), f"{self.bits}-bit codes fill whole bytes"),
            (self.channels or 1, f"groups of {self.channels} channels fill a head"),
        ):
            if head_dim % number:
                raise UsageError(
                    f"{self.name} needs a head_dim that {number} divides, so that {what}; "
                    f"got {head_dim}"
                )


def _beside_blocks(number: Float[Array, "*batch n m"]) -> Float32[Array, "*batch n 1 m 1"]:
    return jnp.expand_dims(number.astype(jnp.float32), (-3, -1))


@dataclasses.dataclass(frozen=True)
class KVCodec:
    """How keys and values are stored.

    Attributes:
        rotate: whether both are rotated first (``pallas_kernels.rotation``), which spreads the few
            large channels that one scale a token could not bear.
        center: whether the model's ``KeyBasis`` is to have a mean.
        balance: whether it is to have a balance.
    """

    name: str
    k: Codec
    v: Codec
    rotate: bool
    center: bool
    balance: bool

    @property
    def group(self) -> int:
        """Consecutive tokens that must be written together."""
        return max(self.k.tokens, self.v.tokens)


def latent_codec(codec: KVCodec) -> KVCodec:
    """The codec as it is used for latents: nothing is rotated, and slots have no values."""
    plain = Codec("bf16", "float", 16)
    return KVCodec(codec.name, codec.k, plain, rotate=False, center=False, balance=False)
