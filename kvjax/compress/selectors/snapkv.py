"""Tokens that an observation window attends to."""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.compress.attention import check_window, group_attention, or_recency
from kvjax.compress.context import Context, in_window
from kvjax.compress.neighbours import check_kernel, pool, position_rank
from kvjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class SnapKV:
    """Votes of an observation window, smoothed over neighbours.

    Li et al., 2024 (arXiv 2404.14469). With ``p_gij`` the attention of query ``i`` of the last
    ``window``, head ``g`` of the group, over all tokens up to ``i``::

        vote_j  = sum over i of mean over g of p_gij     for tokens j before the window
        score_j = pooling of vote over the kernel around j, zeros beyond either end

    The window itself always stays: its tokens get ``+inf``, and their votes are not pooled into
    the tokens before it. The paper selects for each query head, which here would repeat the KV
    heads; the heads of a group vote together. Used once after the prompt, or while decoding.
    Before the first query: recency.

    Attributes:
        window: queries that vote, and last tokens that stay.
        kernel: tokens that are pooled, odd.
        pooling: "average" or "max".
    """

    window: int = 32
    kernel: int = 5
    pooling: Literal["average", "max"] = "average"

    needs_mass: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = False

    def __post_init__(self):
        check_window(self.window)
        check_kernel(self.kernel)
        if self.pooling not in ("average", "max"):
            raise UsageError(f"pooling must be 'average' or 'max', got {self.pooling!r}")

    @property
    def needs_queries(self) -> int:
        return self.window

    def __call__(self, ctx: Context) -> Float[Array, "B Hkv S"]:
        """Float32 scores; the highest stay."""
        window = in_window(ctx, self.window)
        votes = jnp.where(window, 0, group_attention(ctx, self.window).sum(2))
        pooled = pool(votes, position_rank(ctx), self.kernel, self.pooling)
        return or_recency(ctx, jnp.where(window, jnp.inf, pooled))
