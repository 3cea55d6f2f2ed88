"""The shapes of a cache, and the bytes that they come to."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.codecs import KVCodec, kv_codec
from kvjax.dynakv.projector import Projector


@dataclasses.dataclass(frozen=True)
class ClassGeometry:
    """One codec class of one layer.

    Attributes:
        latent: components in a slot, where slots hold blocks of latents instead of a key and a
            value (``pallas_kernels.latent_attention``).
        pages_per_head: the most pages that one KV head of one row can own.
        pages_per_row: the most that all heads of a row can own together, if not each of them can
            own as many as the one that owns the most.
        mass: whether every slot notes the attention that it receives.
        levels: whether every slot notes how many demotions its token survives.
    """

    codec: KVCodec
    page_size: int
    pages_per_head: int
    mass: bool = False
    levels: bool = False
    pages_per_row: int | None = None
    latent: int | None = None

    def of_row(self, heads: int) -> int:
        """The most pages that a row of so many heads, or blocks of latents, can own."""
        return heads * self.pages_per_head if self.pages_per_row is None else self.pages_per_row

    @property
    def capacity(self) -> int:
        """Tokens that one KV head of one row can hold."""
        return self.page_size * self.pages_per_head


@dataclasses.dataclass(frozen=True)
class LayerGeometry:
    """One layer.

    Attributes:
        classes: the first is where new tokens go, in the model's own dtype; if there are more, it
            holds the most recent tokens and the others hold the rest.
        queries: how many of the last queries are kept.
    """

    classes: tuple[ClassGeometry, ...]
    queries: int = 0


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The shapes of a cache; ``init_cache`` makes exactly this.

    Attributes:
        segments: segments of a row's answer, at most, whose thoughts are told apart.
        noted: tokens of a row, at most, that are noted in a ledger; 0: there is none.
        vocab_size: where they are, the tokens that there are.
        projector: what keys and values are compressed by, where latents are kept instead.
        span: where they are, positions are below this.
        longest: rows that can own at once all the pages that a row can own; None: all of them.
        devices: that share the heads. All other numbers are those of one of them.
    """

    layers: tuple[LayerGeometry, ...]
    rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: DTypeLike
    segments: int = 0
    noted: int = 0
    vocab_size: int = 0
    projector: Projector | None = None
    span: int = 0
    longest: int | None = None
    devices: int = 1

    @classmethod
    def full(
        cls, *, num_layers: int, page_size: int, pages_per_head: int, num_heads: int = 0, **shape
    ) -> "Geometry":
        """Every token of every layer in one class of the model's own dtype."""
        only = LayerGeometry((ClassGeometry(kv_codec("bf16"), page_size, pages_per_head),))
        heads = num_heads or shape["num_kv_heads"]
        return cls(layers=(only,) * num_layers, num_heads=heads, **shape)

    def pages(self, shape: ClassGeometry) -> int:
        """Pages of a pool, the scratch page among them."""
        owners = self.rows if self.longest is None else self.longest
        return 1 + owners * shape.of_row(self.heads(shape))

    def heads(self, shape: ClassGeometry) -> int:
        """Lines of a block table: KV heads, or blocks of the keys' latents and of the values'."""
        if shape.latent is None:
            return self.num_kv_heads
        return 2 * self.width // shape.latent

    def channels(self, shape: ClassGeometry) -> tuple[int, int]:
        """Channels of the keys and of the values in a slot; a slot of latents has no values."""
        return (self.head_dim, self.head_dim) if shape.latent is None else (shape.latent, 0)

    @property
    def width(self) -> int:
        """Channels of a token's keys, all heads of all devices together."""
        return self.all_kv_heads * self.head_dim

    @property
    def widest(self) -> int:
        """Slots that no KV head, and positions that no buffer of latents, has more of."""
        return max(self.span, *(part.capacity for layer in self.layers for part in layer.classes))

    @functools.cached_property
    def page_bytes(self) -> tuple[tuple[int, ...], ...]:
        """Bytes of a page and of its table entry, for every layer and class."""
        return tuple(
            tuple(self._pool_bytes(shape) // self.pages(shape) + 4 for shape in layer.classes)
            for layer in self.layers
        )

    @property
    def full_token_bytes(self) -> int:
        """One token in an uncompressed bfloat16 cache, on all devices: the yardstick of ratios."""
        return len(self.layers) * self.all_kv_heads * self.head_dim * 2 * 2

    @property
    def all_kv_heads(self) -> int:
        """KV heads of all devices together."""
        return self.devices * self.num_kv_heads

    @functools.cached_property
    def nbytes(self) -> int:
        """What ``init_cache`` allocates."""
        from kvjax.cache.cache import init_cache

        leaves = jax.eval_shape(lambda: jax.tree.leaves(init_cache(self)))
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    @property
    def pool_bytes(self) -> int:
        return sum(self._pool_bytes(shape) for layer in self.layers for shape in layer.classes)

    @property
    def query_bytes(self) -> int:
        """The last queries of all rows."""
        each = self.rows * self.num_heads * self.head_dim * jnp.dtype(self.dtype).itemsize
        return each * sum(layer.queries for layer in self.layers)

    @property
    def row_bytes(self) -> int:
        """The most that a row can take: its pages, their table entries, last queries and ledger."""
        pages = sum(
            shape.of_row(self.heads(shape)) * each
            for layer, held in zip(self.layers, self.page_bytes, strict=True)
            for shape, each in zip(layer.classes, held, strict=True)
        )
        return pages + self.query_bytes // self.rows + 4 * self.noted

    def slot_bytes(self, shape: ClassGeometry) -> dict[str, float]:
        """One slot of a class, by what it holds."""
        own = jnp.dtype(self.dtype).itemsize
        codes, scales = 0, 0.0
        for part, dim in zip((shape.codec.k, shape.codec.v), self.channels(shape), strict=True):
            codes += part.width(dim) * (own if part.fmt == "float" else 1)
            if part.fmt != "float":
                scales += (part.payload_bits(dim) - part.bits) * dim / 8
        bias = 4.0 if shape.latent is None else 0.0
        return {
            "codes": float(codes),
            "scales": scales,
            "metadata": 4.0 + bias + 4.0 * shape.mass + shape.levels,
        }

    def _pool_bytes(self, shape: ClassGeometry) -> int:
        slots = self.pages(shape) * shape.page_size
        return round(sum(self.slot_bytes(shape).values()) * slots)
