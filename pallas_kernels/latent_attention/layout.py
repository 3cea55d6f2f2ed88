"""How latents lie in pages, and what rebuilds keys and values out of them.

The latent of a token's keys, all KV heads together, are d components, and so is that of its values;
the first so many of each are stored. They are cut into ``n`` blocks of ``d / n`` components. A pool
of latents is a ``KVPages`` without values and biases: a slot is one block of one token, its ``k``
the components, its ``pos`` the token's position. A table has one row of pages for each block of the
keys and of the values, ``2 b`` and ``2 b + 1`` for block ``b``, so that each holds the tokens that
go so far. Every token has the first block of both.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import KVPages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Basis:
    """What rebuilds keys, or values.

    Attributes:
        back: what each component adds to the channels of the KV heads, of all or some; any floats.
        mean: what every token adds to them, or None.
    """

    back: Float[Array, "d e"]
    mean: Float[Array, " e"] | None = None

    def rebuild(self, latent: Float[Array, "B T d"]) -> Float[Array, "B T e"]:
        """Keys, not turned, or values out of float32 components, as exact as these."""
        x = jnp.matmul(latent, self.back.astype(jnp.float32), precision="highest")
        return x if self.mean is None else x + self.mean[None, None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotary:
    """How rebuilt keys are turned to their positions.

    Attributes:
        frequencies: radians a position of each pair of channels.
        factor: multiplies the turned keys.
    """

    frequencies: Float[Array, " half"]
    factor: float = dataclasses.field(default=1.0, metadata={"static": True})


def blocks_of(pool: KVPages, table: Int[Array, "B N P"], width: int) -> int:
    """The blocks that a latent of ``width`` components is cut into.

    Raises:
        ValueError: the table's rows or the pool's slots are of other latents.
    """
    count = table.shape[1] // 2
    if table.shape[1] % 2 or not count or width % count:
        raise ValueError(
            f"a table must have two rows for each block of {width} components, got {table.shape}"
        )
    if pool.components != width // count:
        raise ValueError(
            f"slots must hold {width // count} components, got {pool.components} in {pool.k.shape}"
        )
    return count
