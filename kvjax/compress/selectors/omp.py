"""Keys whose mass adds up to that of all, found one after the other."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.compress.attention import check_window, or_recency
from kvjax.compress.context import Context
from kvjax.errors import UsageError
from kvjax.matching.omp import omp
from kvjax.matching.scores import Head, attention_scores, budgets, each_head, must_stay

PROGRESSIVE = ((0, 1, 1), (300, 2, 2), (1500, 4, 2))
"""Of Zweiger et al.: one key at a time for the first 300, then two, then four."""


@dataclasses.dataclass(frozen=True)
class OMP:
    """Orthogonal matching pursuit on the mass of the last queries.

    Zweiger et al., 2026 (arXiv 2602.16284); ``kvjax.matching.omp`` says how. Over the tokens that
    are not kept anyway (``Context.must``), as many as ``Context.room`` leaves. Slow: the picks
    follow one upon the other. Before the first query: recency.

    Attributes:
        picks: the most keys that are picked of a head. If there is more room, the highest mean
            attention decides on the rest.
        window: latest positions whose queries are looked at.
        schedule: ``(keys found, k, tau)``: from so many keys on, ``k`` are picked at a time, and
            weights are found anew every ``tau`` times. ``PROGRESSIVE`` is the authors' fast one
            for many keys; ``((0, 4, 2),)`` is their fastest.
        cutoff: log of the weight below which a key makes way for another; None: none does.
    """

    picks: int = 1024
    window: int = 64
    schedule: tuple[tuple[int, int, int], ...] = ((0, 1, 1),)
    cutoff: float | None = -7.0

    needs_mass: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = False

    def __post_init__(self):
        check_window(self.window)
        if self.picks < 1:
            raise UsageError(f"picks must be at least 1, got {self.picks}")
        starts = [stage[0] for stage in self.schedule]
        steps = [step for stage in self.schedule for step in stage[1:]]
        if starts[:1] != [0] or starts != sorted(starts) or min(steps) < 1:
            raise UsageError(
                "schedule must be (keys found, k, tau) from 0 keys on, k and tau at least 1, "
                f"got {self.schedule}"
            )

    @property
    def needs_queries(self) -> int:
        return self.window

    def __call__(self, ctx: Context) -> Float[Array, "B Hkv S"]:
        """Float32 scores; the highest stay."""
        must, picks = must_stay(ctx), min(self.picks, ctx.bias.shape[2])

        def scores(head: Head, must, budget):
            mine = head.live & ~must
            seen = head.seen & mine[None]
            logits = head.logits(head.k, head.bias, seen)
            masses = jnp.where(seen, jnp.exp(logits - logits.max(1, keepdims=True)), 0)
            budget = jnp.minimum(budget, picks)
            place = omp(masses, masses.sum(1), mine, budget, picks, self.schedule, self.cutoff)
            found = 2 - place.astype(jnp.float32) / picks
            return jnp.where(place < picks, found, attention_scores(head, mine, "mean"))

        found = each_head(scores, ctx, self.window, must, budgets(ctx))
        return or_recency(ctx, found)
