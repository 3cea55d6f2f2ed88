"""How keys and values lie in pages."""

import dataclasses

import jax
from jaxtyping import Array, Float, Int, Shaped, UInt8

from pallas_kernels.formats import PER_BYTE

SCRATCH_PAGE = 0
"""The page that block tables are padded with, and that rows with nothing to store write to. Every
store to it has bias -inf, so its finite garbage is never attended."""
SLOT_AXIS = {"k": 1, "v": 2, "bias": 1, "pos": 1, "k_scale": 1, "v_scale": 2, "k_zero": 1,
             "v_zero": 2, "mass": 1, "level": 1}  # fmt: skip
"""What a pool may hold of every page, and the axis along which slots lie there."""
UNKNOWN_LEVEL = 255
"""``KVPages.level`` of a token whose segment is still growing: it survives every demotion."""


def _static(default):
    return dataclasses.field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPages:
    """The pool of pages of one layer and one codec class, and all that reading it takes.

    A page belongs to one KV head, so heads may hold different numbers of tokens. A slot is one
    token of one head. Keys carry their rotary position already, so the order of slots has no
    meaning.

    What a slot stands for is ``levels(codes) * scale + zero``, in the class's own basis. Keys are
    there as ``rotate((key - mean) / balance)`` and values as ``rotate(value)``, where ``rotate`` is
    the identity unless ``rotated``.

    Attributes:
        k: keys, one row a slot: numbers, or uint8 codes of ``k_format``.
        v: values, transposed: one column a slot; likewise.
        bias: log-mass added to the slot's attention logit: 0 for an ordinary token, ``-inf`` for a
            free slot, anything else for a slot that stands for more or less mass than itself. None
            for a pool of latents (``pallas_kernels.latent_attention``), whose slots have ``pos``.
        pos: logical position of the slot's token, -1 where free.
        k_scale: what multiplies the levels of the keys, shared by ``page / page_k`` consecutive
            slots and ``D / D_k`` consecutive channels; None for numbers. ``v_scale`` likewise.
        k_zero: what is added to them afterwards, or None; likewise ``v_zero``.
        mean: what was taken off every key of a KV head, or None.
        balance: what every channel of the keys was divided by, or None.
        mass: attention that the slot has received so far, where a selector asks for it.
        level: how many demotions of its segment the slot's token survives, where tokens are kept by
            their segment; 255 until that is known.
        k_format: a name of ``pallas_kernels.formats``, or "float"; ``v_format`` likewise.
        rotated: whether keys and values are rotated.
    """

    k: Shaped[Array, "pages page W"]
    v: Shaped[Array, "pages Wv page"]
    bias: Float[Array, "pages page"] | None
    pos: Int[Array, "pages page"]
    k_scale: Float[Array, "pages page_k D_k"] | None = None
    v_scale: Float[Array, "pages D_v page_v"] | None = None
    k_zero: Float[Array, "pages page_k D_k"] | None = None
    v_zero: Float[Array, "pages D_v page_v"] | None = None
    mean: Float[Array, "Hkv D"] | None = None
    balance: Float[Array, "Hkv D"] | None = None
    mass: Float[Array, "pages page"] | None = None
    level: UInt8[Array, "pages page"] | None = None
    k_format: str = _static("float")
    v_format: str = _static("float")
    rotated: bool = _static(False)

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def components(self) -> int:
        """Channels of a key, or components of a latent, that a slot holds."""
        return self.k.shape[2] * PER_BYTE.get(self.k_format, 1)

    @property
    def plain(self) -> bool:
        """Whether keys and values are numbers as the model made them."""
        coded = (self.k_format, self.v_format) != ("float", "float") or self.rotated
        return not coded and self.mean is None and self.balance is None

    @property
    def uniform(self) -> bool:
        """Whether codes, if there are any, have one scale a slot and no zero point."""
        one = {"k": (self.page_size, 1), "v": (1, self.page_size)}
        scales = {"k": self.k_scale, "v": self.v_scale}
        shared = any(scales[x] is not None and scales[x].shape[1:] != one[x] for x in "kv")
        return not shared and self.k_zero is None and self.v_zero is None


def beyond_offsets(*arrays: Array) -> str | None:
    """Why a Triton kernel cannot address an array, None where it can address all.

    Pallas counts elements in 32 signed bits up to 4 GiB, and in 64 beyond.
    """
    for array in arrays:
        if array.size > 2**31 and array.nbytes <= 2**32:
            return f"{array.nbytes} bytes in one array overflow 32-bit offsets"
    return None
