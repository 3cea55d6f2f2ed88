"""A share of the budget for every segment of the text, and pivotal tokens."""

import dataclasses
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.compress.attention import check_window, or_recency
from kvjax.compress.context import Context
from kvjax.compress.selectors.highest_attention import Score, check_score
from kvjax.errors import UsageError
from kvjax.matching.quotas import quotas
from kvjax.matching.scores import Head, attention_scores, budgets, each_head, must_stay
from kvjax.matching.segments import attention_segments

CHOSEN, PIVOTAL = 2, 4
"""Added to the scores, which are at most 1, of tokens that are to stay."""


@dataclasses.dataclass(frozen=True)
class SegmentQuotas:
    """Thought-aware selection: tokens of every segment, and first those that all queries look at.

    Liu et al., 2026 (arXiv 2608.12331). For each KV head, over the ``N`` tokens that are not kept
    anyway (``Context.must``), of which ``t`` may stay (``Context.room`` less ``must``), with
    ``m_j`` the mean attention of the last ``window`` positions' queries, summing to 1::

        pivotal = those with m_j >= pivotal / N, at most floor(cap * t) of them, the highest
        t_i ~ sqrt(w_i * n_i) tokens of segment i,  sum of t_i = t - pivotal ones

    Segments lie between double newlines (``kvjax.matching.segments``), or where attention jumps.
    ``n_i`` counts a segment's tokens and ``w_i`` is the sum of their ``m_j``. Within a segment the
    highest scores stay. Every segment gets one token at least, as far as ``t`` reaches, and none
    more than it has (``kvjax.matching.quotas``). Before the first query: recency.

    Of what the paper leaves open: ``w_i`` and ``n_i`` count pivotal tokens too, heads of a group
    are pooled, and ``n_i`` counts the slots that a head still holds.

    Attributes:
        window: latest positions whose queries are looked at.
        score: what picks tokens within a segment, over the queries: "rms", "mean" or "max".
        pivotal: multiple of the mean attention from which a token is pivotal; ``inf``: none is.
        cap: most pivotal tokens, as a share of ``t``.
        quota: "sqrt" as above; "linear": ``sqrt(w_i) * n_i``; "size": ``n_i``; "none": the highest
            scores of all, whatever their segment.
        weight: of a segment: "total", or "token", its mean over the segment's tokens.
        exclude_pivotal: whether ``w_i`` and ``n_i`` leave pivotal tokens out.
        by: where a segment ends: "text", as ``Context.segment`` says (None: there is one), or
            "attention", by ``attention_segments`` over the tokens that a head holds.
        least: tokens of a segment; shorter ones are merged.
        merge: with the "previous" segment or with the "next" one.
    """

    window: int = 64
    score: Score = "rms"
    pivotal: float = 3.0
    cap: float = 0.5
    quota: Literal["sqrt", "linear", "size", "none"] = "sqrt"
    weight: Literal["total", "token"] = "total"
    exclude_pivotal: bool = False
    by: Literal["text", "attention"] = "text"
    least: int = 32
    merge: Literal["previous", "next"] = "previous"

    needs_mass: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = False

    def __post_init__(self):
        check_window(self.window)
        check_score(self.score)
        if not self.pivotal >= 0:
            raise UsageError(f"pivotal must be at least 0, got {self.pivotal}")
        if not 0 <= self.cap <= 1:
            raise UsageError(f"cap must be between 0 and 1, got {self.cap}")
        if self.quota not in ("sqrt", "linear", "size", "none"):
            raise UsageError(
                f"quota must be 'sqrt', 'linear', 'size' or 'none', got {self.quota!r}"
            )
        if self.weight not in ("total", "token"):
            raise UsageError(f"weight must be 'total' or 'token', got {self.weight!r}")
        if self.by not in ("text", "attention"):
            raise UsageError(f"by must be 'text' or 'attention', got {self.by!r}")
        if self.merge not in ("previous", "next"):
            raise UsageError(f"merge must be 'previous' or 'next', got {self.merge!r}")
        if self.least < 1:
            raise UsageError(f"least must be at least 1, got {self.least}")

    @property
    def needs_queries(self) -> int:
        return self.window

    @property
    def needs_segments(self) -> bool:
        return self.quota != "none" and self.by == "text"

    def __call__(self, ctx: Context) -> Float[Array, "B Hkv S"]:
        """Float32 scores; the highest stay. They tell the choice for ``ctx.room`` alone."""
        return self.choose(ctx)[0]

    def choose(self, ctx: Context) -> tuple[Float[Array, "B Hkv S"], Bool[Array, "B Hkv S"]]:
        """Scores, and which of the tokens are pivotal: their bias and value must not change."""
        must = must_stay(ctx)
        segment = jnp.zeros_like(ctx.pos) if ctx.segment is None else ctx.segment
        scores, pivotal = each_head(self._choose, ctx, self.window, must, segment, budgets(ctx))
        observed = (ctx.query_pos >= 0).any(1)[:, None, None]
        return or_recency(ctx, scores), pivotal & observed

    def _choose(self, head: Head, must, segment, budget):
        mine = head.live & ~must
        count = mine.sum(dtype=jnp.int32)
        budget = jnp.minimum(budget, count)
        mean = attention_scores(head, mine, "mean")
        scores = mean if self.score == "mean" else attention_scores(head, mine, self.score)

        pivotal = jnp.zeros_like(mine)
        if self.pivotal < math.inf:
            above = mine & (mean * count.astype(jnp.float32) >= self.pivotal)
            most = jnp.floor(self.cap * budget.astype(jnp.float32)).astype(jnp.int32)
            pivotal = above & (_rank_within(~above, mean, head.pos) < most)
        rest = mine & ~pivotal
        left = budget - pivotal.sum(dtype=jnp.int32)
        if self.quota == "none":
            chosen = rest & (_rank_within(~rest, scores, head.pos) < left)
        else:
            if self.by == "attention":
                segment = self._by_attention(head.pos, mine, mean)
            chosen = self._by_segment(head.pos, segment, mine, pivotal, mean, scores, left)
        extra = jnp.where(pivotal, PIVOTAL, jnp.where(chosen, CHOSEN, 0))
        return scores + extra.astype(jnp.float32), pivotal

    def _by_attention(self, pos, mine, mean):
        order = jnp.argsort(jnp.where(mine, pos, jnp.iinfo(jnp.int32).max))
        count = mine.sum(dtype=jnp.int32)
        ordered = attention_segments(mean[order][None], count[None], self.least, self.merge)[0]
        return jnp.zeros_like(pos).at[order].set(ordered)

    def _by_segment(self, pos, segment, mine, pivotal, mean, scores, left):
        rest = mine & ~pivotal
        number = _consecutive(segment, mine)
        counted = rest if self.exclude_pivotal else mine

        def total(of):
            return jax.ops.segment_sum(of, number, len(number))

        size = total(counted.astype(jnp.float32))
        weight = total(jnp.where(counted, mean, 0))
        if self.weight == "token":
            weight = weight / jnp.maximum(size, 1)
        share = {
            "sqrt": jnp.sqrt(weight * size),
            "linear": jnp.sqrt(weight) * size,
            "size": size,
        }[self.quota]
        quota = quotas(share, total(rest.astype(jnp.int32)), left)
        place = jnp.where(rest, number, len(number))
        first = jnp.cumsum(total(rest.astype(jnp.int32))) - total(rest.astype(jnp.int32))
        rank = _rank_within(place, scores, pos)
        return rest & (rank - first[number] < quota[number])


def _rank_within(kind, scores, pos):
    """A slot's place by kind, then by score from the highest, then by position from the last."""
    slot = jnp.arange(len(pos), dtype=jnp.int32)
    keys = kind.astype(jnp.int32), -scores, -pos, slot
    *_, order = jax.lax.sort(keys, num_keys=3)
    return slot.at[order].set(slot)


def _consecutive(segment, mine):
    """The segments that a head holds tokens of, renumbered from 0; the last number elsewhere."""
    last = jnp.iinfo(jnp.int32).max
    segment = jnp.where(mine, segment, last)
    order = jnp.argsort(segment, stable=True)
    ordered = segment[order]
    new = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]])
    number = jnp.cumsum(new, dtype=jnp.int32)
    return jnp.zeros_like(segment).at[order].set(number)
