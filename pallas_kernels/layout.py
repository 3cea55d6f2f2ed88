"""How keys and values lie in pages."""

import dataclasses

import jax
from jaxtyping import Array, Float, Int

SCRATCH_PAGE = 0
"""The page that block tables are padded with, and that rows with nothing to store write to. Every
store to it has bias -inf, so its finite garbage is never attended."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPages:
    """The pool of pages of one layer and one codec class.

    A page belongs to one KV head, so heads may hold different numbers of tokens. A slot is one
    token of one head. Keys carry their rotary position already, so the order of slots has no
    meaning.

    Attributes:
        k: keys, one row a slot.
        v: values, transposed: one column a slot.
        bias: log-mass added to the slot's attention logit: 0 for an ordinary token, ``-inf`` for a
            free slot, anything else for a slot that stands for more or less mass than itself.
        pos: logical position of the slot's token, -1 where free.
    """

    k: Float[Array, "pages page D"]
    v: Float[Array, "pages D page"]
    bias: Float[Array, "pages page"]
    pos: Int[Array, "pages page"]

    @property
    def page_size(self) -> int:
        return self.k.shape[1]
