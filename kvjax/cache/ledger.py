"""What is noted of a row's text, for those that look for its paragraphs."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ledger:
    """Newlines in the text that every row has read.

    Attributes:
        flags: of the row's tokens by logical position, as ``kvjax.matching.segments`` has them.
        of_token: of every token of the vocabulary.
    """

    flags: UInt8[Array, "B L"]
    of_token: UInt8[Array, " V"]

    def note(
        self, tokens: Int[Array, "B T"], pos: Int[Array, "B T"], real: Bool[Array, "B T"]
    ) -> "Ledger":
        """The ledger with tokens that have been read; those that are not real are left out."""
        row = jnp.arange(len(pos), dtype=jnp.int32)[:, None]
        where = jnp.where(real, pos, self.flags.shape[1])
        flags = self.flags.at[row, where].set(self.of_token[tokens], mode="drop")
        return dataclasses.replace(self, flags=flags)
