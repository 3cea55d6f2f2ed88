"""Selectors that share out a budget: what stays, and what the choice reduces to."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.compress import keep_mask
from kvjax.compress.selectors import OMP, HighestAttention, SegmentQuotas
from kvjax.compress.selectors.omp import PROGRESSIVE
from kvjax.matching import AttentionMatching
from tests.compress import layer, oracles
from tests.matching import caches

LEVEL = {"xla_backend_optimization_level": 0}
QUOTAS = [
    SegmentQuotas(window=8),
    SegmentQuotas(window=8, quota="size", pivotal=1.0, cap=0.25),
    SegmentQuotas(window=8, quota="linear", weight="token", exclude_pivotal=True, pivotal=1.5),
    SegmentQuotas(window=8, quota="none", score="mean", pivotal=0.0, cap=0.4),
    SegmentQuotas(window=8, pivotal=math.inf, score="max"),
    SegmentQuotas(window=8, by="attention", least=4),
]


@functools.cache
def problem():
    return layer.build(2, seed=21, room=19)


@functools.partial(jax.jit, static_argnums=0, compiler_options=LEVEL)
def choose(selector, ctx):
    scores, pivotal = selector.choose(ctx)
    return keep_mask(scores, ctx.live, ctx.pos, ctx.must, ctx.room), pivotal


@functools.partial(jax.jit, static_argnums=0, compiler_options=LEVEL)
def kept(selector, ctx):
    must = jnp.zeros_like(ctx.live) if ctx.must is None else ctx.must
    return keep_mask(selector(ctx), ctx.live, ctx.pos, must, ctx.room)


@pytest.mark.parametrize("selector", QUOTAS, ids=range(len(QUOTAS)))
def test_what_stays_is_what_was_chosen(selector):
    """The budget is met in every head, and pivotal tokens are among those that stay."""
    ctx = problem()
    keep, pivotal = (np.asarray(x) for x in choose(selector, ctx))
    for row, head in np.ndindex(keep.shape[:2]):
        tokens = layer.tokens_of(ctx, row, head)
        forced = sum(token.must for token in tokens)
        assert keep[row, head].sum() == max(forced, min(19, len(tokens)))
        if not layer.queries_of(ctx, row, head):
            assert not pivotal[row, head].any()
            continue
        first, chosen, _ = oracles.segment_quotas(ctx, row, head, selector)
        stays = {i for i, token in enumerate(tokens) if token.must or i in first or i in chosen}
        assert set(np.flatnonzero(keep[row, head])) == {tokens[i].slot for i in stays}
        assert set(np.flatnonzero(pivotal[row, head])) == {tokens[i].slot for i in first}


def test_every_segment_keeps_a_token_as_far_as_there_is_room():
    ctx = problem()
    keep = np.asarray(choose(QUOTAS[4], ctx)[0])
    several = 0
    for row, head in np.ndindex(keep.shape[:2]):
        mine = [token for token in layer.tokens_of(ctx, row, head) if not token.must]
        names = {token.segment for token in mine}
        room = 19 - sum(token.must for token in layer.tokens_of(ctx, row, head))
        if layer.queries_of(ctx, row, head) and len(names) <= room:
            assert {token.segment for token in mine if keep[row, head, token.slot]} == names
            several += len(names) > 2
    assert several >= 3


class TestPivotal:
    def test_none_and_the_cap(self):
        ctx = problem()
        left = np.minimum(19, np.asarray(ctx.live.sum(2))) - np.asarray(
            (ctx.must & ctx.live).sum(2)
        )
        asked = np.asarray((ctx.query_pos >= 0).any(1))
        none = choose(dataclasses.replace(QUOTAS[0], pivotal=math.inf), ctx)[1]
        assert not none.any()
        every = choose(dataclasses.replace(QUOTAS[0], pivotal=0.0, cap=0.3), ctx)[1]
        expected = np.where(asked[:, None], np.floor(np.float32(0.3) * left.clip(0)), 0)
        np.testing.assert_array_equal(every.sum(2), expected)

    def test_they_stay_bit_for_bit_and_compete_again(self):
        """Two rounds: what was pivotal keeps its key, bias and value, then is one of many."""
        ctx = dataclasses.replace(problem(), room=jnp.full(8, 24, jnp.int32))
        keep, pivotal = choose(QUOTAS[1], ctx)
        fixed = pivotal | (ctx.must & ctx.live)
        fitted = caches.match(AttentionMatching(8), ctx, keep, fixed, 24)
        index = np.asarray(fitted.index)
        for name, new in (("bias", fitted.bias), ("v", fitted.v)):
            old = np.asarray(getattr(ctx, name))
            at = index if name == "bias" else index[..., None]
            old = np.take_along_axis(old, at, 2)
            same = np.take_along_axis(np.asarray(fixed & keep), index, 2) & np.asarray(fitted.valid)
            np.testing.assert_array_equal(np.asarray(new)[same], old[same])
        bias = np.full(ctx.bias.shape, -np.inf, np.float32)
        np.put_along_axis(bias, index, np.asarray(fitted.bias), 2)
        bias = np.where(np.asarray(keep), bias, -np.inf)
        fewer = dataclasses.replace(ctx, bias=jnp.asarray(bias), room=jnp.full(8, 12, jnp.int32))
        again, second = choose(QUOTAS[1], fewer)
        assert (np.asarray(pivotal) & ~np.asarray(again)).any()
        assert (np.asarray(pivotal) & ~np.asarray(second) & np.asarray(again)).any()


class TestReductions:
    def test_one_segment_and_none_pivotal_is_the_highest_attention(self):
        """And so are quotas that are switched off, with several."""
        ctx = problem()
        one = dataclasses.replace(ctx, segment=jnp.zeros_like(ctx.pos))
        plain = kept(HighestAttention(window=8), ctx)
        selector = SegmentQuotas(window=8, pivotal=math.inf)
        np.testing.assert_array_equal(choose(selector, one)[0], plain)
        no_segments = dataclasses.replace(ctx, segment=None)
        np.testing.assert_array_equal(choose(selector, no_segments)[0], plain)
        off = dataclasses.replace(selector, quota="none")
        np.testing.assert_array_equal(choose(off, ctx)[0], plain)
        assert (choose(selector, ctx)[0] != plain).any()

    def test_room_for_all_keeps_all(self):
        ctx = dataclasses.replace(problem(), room=jnp.full(8, 60, jnp.int32))
        for selector in (QUOTAS[0], QUOTAS[3]):
            np.testing.assert_array_equal(choose(selector, ctx)[0], ctx.live)

    def test_room_for_nothing_keeps_what_must_stay(self):
        ctx = dataclasses.replace(problem(), room=jnp.zeros(8, jnp.int32))
        keep, pivotal = choose(QUOTAS[0], ctx)
        np.testing.assert_array_equal(keep, ctx.must & ctx.live)
        assert not pivotal.any()


def test_uniform_attention_is_shared_out_by_size():
    """The table of the two rules and the two weights: size in the paper's, of all four."""
    sizes = np.array([64, 128, 256, 576])
    segment = np.repeat(np.arange(4), sizes)
    ctx = caches.clustered(0, 1024, 4, free=0)
    late = dataclasses.replace(
        ctx,
        k=jnp.zeros_like(ctx.k),
        query_pos=ctx.query_pos + 4,
        room=jnp.asarray([100], jnp.int32),
        must=jnp.zeros_like(ctx.live),
        segment=jnp.asarray(segment, jnp.int32)[ctx.pos],
    )
    rule = {}
    for quota, weight in (
        ("sqrt", "total"),
        ("linear", "total"),
        ("sqrt", "token"),
        ("linear", "token"),
    ):
        selector = SegmentQuotas(window=4, pivotal=math.inf, quota=quota, weight=weight)
        keep = np.asarray(choose(selector, late)[0])
        rule[quota, weight] = [
            np.bincount(segment[np.asarray(late.pos)[0, h, keep[0, h]]], minlength=4)
            for h in (0, 1)
        ]

    def close(found, power):
        shares = 100 * sizes**power / (sizes**power).sum()
        assert all(np.abs(one - shares).max() < 1 for one in found)

    close(rule["sqrt", "total"], 1.0)
    close(rule["linear", "total"], 1.5)
    close(rule["sqrt", "token"], 0.5)
    close(rule["linear", "token"], 1.0)


def test_budgets_may_differ_from_head_to_head():
    ctx = problem()
    room = jnp.asarray(np.random.default_rng(0).integers(6, 30, (8, 2)), jnp.int32)
    for selector in (QUOTAS[0], OMP(12, window=8)):
        keep = kept(selector, dataclasses.replace(ctx, room=room))
        forced, live = ((x).sum(2) for x in (ctx.must & ctx.live, ctx.live))
        expected = np.maximum(forced, np.minimum(room, live))
        np.testing.assert_array_equal(keep.sum(2), expected)


def test_highest_attention_needs_no_budget():
    ctx = problem()
    free = dataclasses.replace(ctx, must=None, room=None, segment=None)
    anyway = dataclasses.replace(ctx, must=jnp.zeros_like(ctx.must))
    run = jax.jit(HighestAttention(window=8).__call__)
    same = np.where(ctx.live, run(free), 0), np.where(ctx.live, run(anyway), 0)
    np.testing.assert_allclose(*same, rtol=1e-6)  # by two programs


class TestOMP:
    """Against a plain search in float64, and against the highest attention."""

    @functools.cache  # noqa: B019
    def cache(self):
        ctx = caches.pair(9, 200, 64, 256)
        return tuple(dataclasses.replace(c, room=jnp.asarray([24], jnp.int32)) for c in ctx)

    def order(self, selector, ctx) -> list[list[int]]:
        """Of every head the picked slots, the first one first."""
        scores = np.where(ctx.live, jax.jit(selector.__call__, compiler_options=LEVEL)(ctx), 0)[0]
        return [np.argsort(-line, kind="stable")[: (line > 1).sum()].tolist() for line in scores]

    def plain(self, ctx, head, count, k=1, tau=1, cutoff=None) -> list[int]:
        attention = caches.plain(ctx, head)
        at = np.flatnonzero(np.asarray(ctx.live)[0, head])
        e = np.exp(attention.logits - attention.shift)

        def weights():
            return np.linalg.lstsq(e[:, found], e.sum(1))[0].clip(1e-12, np.exp(7))

        def extend(w, k, tau):
            events = 0
            while len(found) < count:
                worth = e.T @ (e.sum(1) - e[:, found] @ w)
                worth[found + gone] = -np.inf
                new = np.argsort(-worth, kind="stable")[:k].tolist()
                found.extend(new)
                w = np.append(w, [1e-12] * len(new))
                events += 1
                if events % tau == 0:
                    w = weights()

        found, gone = [], []
        extend(np.zeros(0), k, tau)
        for _ in range(0 if cutoff is None else 3):
            poor = [i for i, w in zip(found, weights(), strict=True) if w < np.exp(cutoff)]
            gone += poor
            found[:] = [i for i in found if i not in poor]
            extend(weights(), 1, 1)
        return at[found[:count]].tolist()

    @pytest.mark.parametrize(("k", "tau"), [(1, 1), (4, 2)])
    def test_picks(self, k, tau):
        ctx, _ = self.cache()
        picks = self.order(OMP(24, window=64, schedule=((0, k, tau),), cutoff=None), ctx)
        for head in range(2):
            assert picks[head] == self.plain(ctx, head, 24, k, tau)

    def test_the_first_picks_do_not_depend_on_how_many_follow(self):
        ctx, _ = self.cache()
        few = self.order(OMP(9, window=64, cutoff=None), ctx)
        many = self.order(OMP(24, window=64, cutoff=None), ctx)
        assert few == [line[:9] for line in many]

    @pytest.mark.slow
    def test_progress_is_faster_later(self):
        stages = ((0, 1, 1), (6, 2, 2), (10, 4, 2))
        ctx, _ = self.cache()
        staged = self.order(OMP(24, window=64, schedule=stages, cutoff=None), ctx)
        plain = self.order(OMP(24, window=64, cutoff=None), ctx)
        assert [line[:7] for line in staged] == [line[:7] for line in plain]
        assert staged != plain
        assert PROGRESSIVE == ((0, 1, 1), (300, 2, 2), (1500, 4, 2))

    @pytest.mark.slow
    def test_mass_is_nearer_than_with_the_highest_attention(self):
        fit, other = self.cache()
        fits = AttentionMatching(64, mode="faithful", bounds=(1e-12, math.exp(7)), steps=0)
        errors = {}
        for name, selector in {
            "attention": HighestAttention(window=64),
            "omp": OMP(24, window=64),
            "fast": OMP(24, window=64, schedule=((0, 4, 2),)),
        }.items():
            keep = kept(selector, fit)
            assert (keep.sum(2) == 24).all()
            fitted = caches.match(fits, fit, keep, caches.nothing(fit), 24)
            errors[name] = caches.errors(other, fitted)[1]
        assert errors["omp"] < 0.95 * errors["attention"]
        assert errors["fast"] < 1.2 * errors["omp"]

    def test_keys_of_no_worth_make_way(self):
        """A low cutoff changes nothing; what goes by a high one does not come back."""
        ctx, _ = self.cache()
        all_of_them = self.order(OMP(24, window=64, cutoff=None), ctx)
        assert self.order(OMP(24, window=64, cutoff=-40.0), ctx) == all_of_them
        few = self.order(OMP(24, window=64, cutoff=0.6), ctx)
        for head in range(2):
            assert few[head] == self.plain(ctx, head, 24, cutoff=0.6)
            assert 0 < len(set(all_of_them[head]) - set(few[head])) < 20
