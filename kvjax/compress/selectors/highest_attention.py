"""Tokens that the last queries attend to, none of them averaged away."""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.compress.attention import check_window, or_recency
from kvjax.compress.context import Context
from kvjax.compress.neighbours import check_kernel, pool, position_rank
from kvjax.errors import UsageError
from kvjax.matching.scores import Head, attention_scores, each_head, must_stay

Score = Literal["rms", "mean", "max"]


@dataclasses.dataclass(frozen=True)
class HighestAttention:
    """The keys that attention matching keeps: ``score_j = sqrt(mean over i of a_ij^2)``.

    Zweiger et al., 2026 (arXiv 2602.16284). ``a_i`` is the attention of query ``i``, one of all the
    group's heads at the last ``window`` positions, over the tokens that are not kept anyway
    (``Context.must``). Before the first query: recency.

    Attributes:
        window: latest positions whose queries are looked at.
        score: "rms" as above, "mean" or "max" over the queries.
        kernel: neighbours over which scores are averaged, odd; 1: none.
    """

    window: int = 64
    score: Score = "rms"
    kernel: int = 1

    needs_mass: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = False

    def __post_init__(self):
        check_window(self.window)
        check_kernel(self.kernel)
        check_score(self.score)

    @property
    def needs_queries(self) -> int:
        return self.window

    def __call__(self, ctx: Context) -> Float[Array, "B Hkv S"]:
        """Float32 scores; the highest stay."""

        def scores(head: Head, must):
            return attention_scores(head, ~must, self.score)

        found = each_head(scores, ctx, self.window, must_stay(ctx))
        if self.kernel > 1:
            found = pool(jnp.where(ctx.live, found, 0), position_rank(ctx), self.kernel, "average")
        return or_recency(ctx, found)


def check_score(score: str) -> None:
    """Refuse a reduction over queries that is not known.

    Raises:
        UsageError: it is none of "rms", "mean" and "max".
    """
    if score not in ("rms", "mean", "max"):
        raise UsageError(f"score must be 'rms', 'mean' or 'max', got {score!r}")
