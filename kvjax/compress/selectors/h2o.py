"""Tokens that have received the most attention."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.compress.context import Context


@dataclasses.dataclass(frozen=True)
class H2O:
    """Heavy hitters: ``score_j = sum over queries i and heads g of the group of p_gij``.

    Zhang et al., 2023 (arXiv 2306.14048): the attention that a token has received from every query
    since it was read, the prompt's included. The paper has one query head per KV head; here the
    heads of a group are summed. The paper's recent tokens are those that the budget protects.
    """

    needs_queries: ClassVar[int] = 0
    needs_mass: ClassVar[bool] = True
    needs_keys: ClassVar[bool] = False

    def __call__(self, ctx: Context) -> Float[Array, "B Hkv S"]:
        """Float32 scores; the highest stay."""
        return ctx.mass.astype(jnp.float32)
