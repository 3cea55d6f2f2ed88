"""The text that every row has read, for what looks at it again."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ledger:
    """Tokens as they were read; they are never decoded and encoded again.

    Attributes:
        tokens: of each row by logical position.
        newlines: flags of every token of the vocabulary (``kvjax.matching.segments``).
        instruction: tokens that ask the model to repeat its context.
    """

    tokens: Int[Array, "B L"]
    newlines: UInt8[Array, " V"]
    instruction: Int[Array, " N"]

    @property
    def flags(self) -> UInt8[Array, "B L"]:
        """The newlines at every position; of what has not been read, anything."""
        return self.newlines[self.tokens]

    def note(
        self, tokens: Int[Array, "B T"], pos: Int[Array, "B T"], real: Bool[Array, "B T"]
    ) -> "Ledger":
        """The ledger with tokens that have been read; those that are not real are left out."""
        row = jnp.arange(len(pos), dtype=jnp.int32)[:, None]
        where = jnp.where(real, pos, self.tokens.shape[1])
        noted = self.tokens.at[row, where].set(tokens.astype(jnp.int32), mode="drop")
        return dataclasses.replace(self, tokens=noted)


def empty_ledger(rows: int, tokens: int, vocab_size: int) -> Ledger:
    """Nothing read, and no token known for a newline."""
    nothing = jnp.zeros((rows, tokens), jnp.int32)
    return Ledger(nothing, jnp.zeros(vocab_size, jnp.uint8), jnp.zeros(1, jnp.int32))
