"""Tokens that the last query attends to."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float

from kvjax.compress.attention import group_attention, or_recency
from kvjax.compress.context import Context


@dataclasses.dataclass(frozen=True)
class TOVA:
    """Token omission via attention: ``score_j = mean over heads g of the group of p_gj``.

    Oren et al., 2024 (arXiv 2401.06104), with ``p_g`` the attention of the last query over all
    tokens. The paper takes the mean over all heads of a layer, here over those that share a KV
    head, so that every KV head keeps its own tokens. Before the first query: recency.
    """

    needs_queries: ClassVar[int] = 1
    needs_mass: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = False

    def __call__(self, ctx: Context) -> Float[Array, "B Hkv S"]:
        """Float32 scores; the highest stay."""
        return or_recency(ctx, group_attention(ctx, 1).sum(2))
