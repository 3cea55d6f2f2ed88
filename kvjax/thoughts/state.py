"""What is known of the thoughts of every row."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

KINDS = "RET"
"""Reasoning, execution, transition: a kind is an index into these."""
TRANSITION = KINDS.index("T")
NO_KIND = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Thoughts:
    """The segments of every row's answer: equally long stretches from the end of its prompt on.

    Attributes:
        kind: what each segment is; ``NO_KIND`` where that is not known yet.
        level: how often each has been demoted.
        sparsity: what was measured when the kind was found; NaN where nothing was.
        demoted: how often segments were demoted: by transitions, and for the budget.
    """

    kind: Int[Array, "B segments"]
    level: Int[Array, "B segments"]
    sparsity: Float[Array, "B segments"]
    demoted: Int[Array, "B 2"]


def no_thoughts(rows: int, segments: int) -> Thoughts:
    """Rows that have not begun to answer."""
    size = rows, segments
    return Thoughts(
        kind=jnp.full(size, NO_KIND, jnp.int32),
        level=jnp.zeros(size, jnp.int32),
        sparsity=jnp.full(size, jnp.nan, jnp.float32),
        demoted=jnp.zeros((rows, 2), jnp.int32),
    )
