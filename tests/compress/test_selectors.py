"""Selectors against their formulas, and what none of them may depend on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.compress import Context
from kvjax.compress.attention import latest_queries
from kvjax.compress.selectors import (
    H2O,
    OMP,
    RKV,
    TOVA,
    HighestAttention,
    Random,
    SegmentQuotas,
    SnapKV,
    Streaming,
)
from kvjax.errors import UsageError
from tests.compress import layer, oracles

ORACLES = {
    Streaming: oracles.streaming,
    Random: oracles.random,
    H2O: oracles.h2o,
    TOVA: oracles.tova,
    SnapKV: oracles.snapkv,
    RKV: oracles.rkv,
    HighestAttention: oracles.highest_attention,
    SegmentQuotas: oracles.tam,
}
SELECTORS = [
    Streaming(),
    Random(),
    H2O(),
    TOVA(),
    SnapKV(window=6),
    SnapKV(window=8, kernel=7, pooling="max"),
    RKV(),
    RKV(window=5, kernel=3, threshold=0.2, mix_lambda=0.6, shield_first=False),
    HighestAttention(window=6),
    HighestAttention(window=8, score="max", kernel=3),
    SegmentQuotas(window=8),
    SegmentQuotas(window=6, score="mean", pivotal=1.5, quota="linear", weight="token"),
]


@functools.cache
def problem(group: int) -> Context:
    return layer.build(group, seed=10 + group)


@functools.cache
def compiled(selector):
    # Many small programs, each run a few times.
    return jax.jit(selector.__call__, compiler_options={"xla_backend_optimization_level": 0})


def scores_of(selector, ctx: Context) -> np.ndarray:
    """The scores where a token is, zero elsewhere."""
    scores = compiled(selector)(ctx)
    assert scores.dtype == jnp.float32 and scores.shape == ctx.bias.shape
    return np.where(ctx.live, scores, 0)


def expected(selector, ctx: Context) -> np.ndarray:
    scores = np.zeros(ctx.bias.shape)
    for row, head in np.ndindex(scores.shape[:2]):
        tokens = layer.tokens_of(ctx, row, head)
        for token, score in zip(
            tokens, ORACLES[type(selector)](ctx, row, head, selector), strict=True
        ):
            scores[row, head, token.slot] = score
    return scores


def check(selector, ctx: Context) -> None:
    np.testing.assert_allclose(
        scores_of(selector, ctx), expected(selector, ctx), rtol=2e-5, atol=1e-7
    )


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
def test_formula(selector, group):
    check(selector, problem(group))


@pytest.mark.parametrize("selector", [TOVA(), SnapKV(window=6), RKV()], ids=repr)
def test_a_permuted_head_map_shows(selector):
    """Query head h reads KV head h // G, not h % Hkv."""
    ctx = problem(3)
    other = np.arange(6).reshape(2, 3).T.ravel()
    permuted = dataclasses.replace(ctx, queries=ctx.queries[:, :, other])
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(
            scores_of(selector, permuted), expected(selector, ctx), rtol=1e-2, atol=1e-3
        )


def test_problems_are_awkward():
    """Few tokens, none, evicted ones in the window, and keys with and without a repetition."""
    ctx = problem(3)
    counts = np.asarray(ctx.live.sum(2))
    assert {0, 1, 5}.issubset(counts.ravel().tolist())
    assert (counts[:, 0] != counts[:, 1]).sum() > 3
    last = np.asarray(ctx.live & (ctx.pos >= (ctx.length - 8)[:, None, None])).sum(2)
    assert (last[:2] < 8).sum() > 2, "tokens of the window are missing"
    alone = []
    for row, head in np.ndindex(counts.shape):
        units = [t.key / np.linalg.norm(t.key) for t in layer.tokens_of(ctx, row, head)]
        alone += [sum(float(a @ b) > 0.5 for b in units) == 1 for a in units]
    assert sum(alone) > 5 and len(alone) - sum(alone) > 50


def test_latest_queries_are_those_that_were_asked():
    ctx = problem(3)
    for row, asked in enumerate(layer.HELD):
        latest = np.flatnonzero(latest_queries(ctx, 8)[row])
        length = layer.LENGTHS[row]
        expected = range(length - min(asked, 8), length)
        assert sorted(np.asarray(ctx.query_pos)[row, latest].tolist()) == list(expected)


@pytest.mark.parametrize("shield_first", [True, False])
def test_rkv_over_several_blocks(shield_first):
    ctx = layer.build(2, seed=1, lengths=(400, 150, 8), held=(12, 12, 8), slots=140)
    check(RKV(shield_first=shield_first), ctx)


def test_rkv_spares_the_latest_of_equal_keys():
    """Equal, opposite and zero keys: every key but the latest of a kind is counted as repeated."""
    ctx = layer.build(1, lengths=(40,), held=(12,))
    kinds = np.array([[1.0] * 8, [-1.0] * 8, [0.0] * 8])
    k = jnp.where(ctx.live[..., None], jnp.asarray(kinds, jnp.float32)[ctx.pos % 3], jnp.nan)
    ctx = dataclasses.replace(ctx, k=k)
    check(RKV(mix_lambda=0.0), ctx)
    check(RKV(mix_lambda=0.0, shield_first=False), ctx)


@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
def test_the_order_of_slots_does_not_matter(selector):
    ctx = problem(3)
    rng = np.random.default_rng(0)
    order = rng.permuted(np.broadcast_to(np.arange(layer.SLOTS), ctx.bias.shape), axis=2)
    moved = scores_of(selector, layer.permuted(ctx, order))
    straight = np.take_along_axis(scores_of(selector, ctx), order, axis=2)
    np.testing.assert_allclose(moved, straight, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
def test_a_row_alone_and_among_free_slots_scores_as_in_the_batch(selector):
    ctx = problem(3)
    together = scores_of(selector, ctx)
    wider = layer.widened(ctx, before=90, after=30)
    for row in range(len(layer.LENGTHS)):
        alone = scores_of(selector, layer.row_of(wider, row))
        np.testing.assert_allclose(alone[0, :, 90:-30], together[row], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
def test_reads_only_what_it_says_it_needs(selector):
    ctx = problem(3)
    unneeded = {}
    if not selector.needs_mass:
        unneeded["mass"] = None
    if not selector.needs_queries:
        unneeded |= {"queries": None, "query_pos": None}
    if not (selector.needs_keys or selector.needs_queries):
        unneeded["k"] = None
    fewer = dataclasses.replace(ctx, **unneeded)
    np.testing.assert_array_equal(scores_of(selector, fewer), scores_of(selector, ctx))
    if selector.needs_queries:
        enough = ctx.query_pos >= (ctx.length - selector.needs_queries)[:, None]
        queries = jnp.where(enough[:, :, None, None], ctx.queries, jnp.nan)
        less = dataclasses.replace(
            ctx, queries=queries, query_pos=jnp.where(enough, ctx.query_pos, -1)
        )
        np.testing.assert_array_equal(scores_of(selector, less), scores_of(selector, ctx))


@pytest.mark.parametrize("selector", [TOVA(), SnapKV(window=6), RKV()], ids=repr)
def test_low_precision_is_widened_before_any_product(selector):
    ctx = problem(3)
    low = dataclasses.replace(
        ctx, k=ctx.k.astype(jnp.bfloat16), queries=ctx.queries.astype(jnp.float16)
    )
    wide = dataclasses.replace(
        low, k=low.k.astype(jnp.float32), queries=low.queries.astype(jnp.float32)
    )
    np.testing.assert_allclose(
        scores_of(selector, low), scores_of(selector, wide), rtol=1e-6, atol=1e-8
    )


class TestRandom:
    def context(self, **changes) -> Context:
        """One row of 2 heads with all of its 3,000 tokens."""
        shape = (1, 2, 3000)
        pos = jnp.broadcast_to(jnp.arange(3000, dtype=jnp.int32), shape)
        row = jnp.full((1,), 3000, jnp.int32)
        values = {
            "bias": jnp.zeros(shape, jnp.float32),
            "pos": pos,
            "length": row,
            "prompt": row,
            "seed": jnp.asarray(7, jnp.int32),
        }
        return Context(**values | changes)

    def test_draws_are_uniform(self):
        scores = scores_of(Random(), self.context())
        for draws in scores[0]:
            assert draws.min() >= 0 and draws.max() < 1
            steps = np.arange(1, 3001) / 3000
            assert np.abs(np.sort(draws) - steps).max() < 1.63 / 3000**0.5  # 1 % of Kolmogorov's
            assert len(set(draws.tolist())) > 2990

    def test_every_part_of_a_token_s_name_changes_its_draw(self):
        base = scores_of(Random(), self.context())
        length, seed = jnp.full((1,), 3001, jnp.int32), jnp.asarray(8, jnp.int32)
        for changes in ({"seed": seed}, {"layer": 1}, {"length": length}):
            other = scores_of(Random(), self.context(**changes))
            assert abs(np.corrcoef(base.ravel(), other.ravel())[0, 1]) < 0.06
        assert abs(np.corrcoef(base[0, 0], base[0, 1])[0, 1]) < 0.08
        assert abs(np.corrcoef(base[0, 0, 1:], base[0, 0, :-1])[0, 1]) < 0.08

    def test_nothing_else_changes_it(self):
        """Rows of one length draw alike for one position, whatever else they hold."""
        ctx = self.context()
        base = scores_of(Random(), ctx)
        few = ctx.pos[:, :, 1000:1100]
        other = self.context(
            bias=jnp.concatenate([jnp.full(few.shape, -0.5, jnp.float32)] * 2),
            pos=jnp.concatenate([few[:, :, ::-1], few + 500]),
            length=jnp.asarray([3000, 3000], jnp.int32),
            prompt=jnp.asarray([1, 2], jnp.int32),
        )
        scores = scores_of(Random(), other)
        np.testing.assert_array_equal(scores[0], base[0, :, 1000:1100][:, ::-1])
        np.testing.assert_array_equal(scores[1], base[0, :, 1500:1600])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SnapKV(kernel=4), "kernel must be an odd number of neighbours, got 4"),
        (lambda: RKV(kernel=0), "kernel must be an odd number of neighbours, got 0"),
        (lambda: SnapKV(window=0), "window must hold at least 1 query, got 0"),
        (lambda: RKV(window=-1), "window must hold at least 1 query, got -1"),
        (lambda: SnapKV(pooling="mean"), "pooling must be 'average' or 'max', got 'mean'"),
        (lambda: RKV(threshold=-0.1), "threshold must be at least 0 and below 1, got -0.1"),
        (lambda: RKV(mix_lambda=1.5), "mix_lambda must be between 0 and 1, got 1.5"),
        (lambda: HighestAttention(score="sum"), "score must be 'rms', 'mean' or 'max', got 'sum'"),
        (lambda: SegmentQuotas(score="sum"), "score must be 'rms', 'mean' or 'max', got 'sum'"),
        (lambda: SegmentQuotas(pivotal=-1.0), "pivotal must be at least 0, got -1.0"),
        (lambda: SegmentQuotas(cap=1.5), "cap must be between 0 and 1, got 1.5"),
        (lambda: SegmentQuotas(quota="even"), "quota must be 'sqrt', .* got 'even'"),
        (lambda: SegmentQuotas(weight="mean"), "weight must be 'total' or 'token', got 'mean'"),
        (lambda: SegmentQuotas(by="topic"), "by must be 'text' or 'attention', got 'topic'"),
        (lambda: SegmentQuotas(least=0), "least must be at least 1, got 0"),
        (lambda: OMP(0), "picks must be at least 1, got 0"),
        (lambda: OMP(8, schedule=((1, 1, 1),)), "schedule must be .* got"),
        (lambda: OMP(8, schedule=()), "schedule must be .* got"),
        (lambda: OMP(8, schedule=((0, 0, 1),)), "schedule must be .* got"),
    ],
)
def test_parameters_that_cannot_be_used_are_refused(unchecked, make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_defaults_are_those_of_the_papers():
    assert SnapKV() == SnapKV(window=32, kernel=5, pooling="average")
    assert RKV() == RKV(window=8, kernel=7, threshold=0.5, mix_lambda=0.07, shield_first=True)
    needs = [(s.needs_queries, s.needs_mass, s.needs_keys) for s in (TOVA(), H2O(), SnapKV())]
    assert needs == [(1, False, False), (0, True, False), (32, False, False)]
    assert (RKV().needs_queries, RKV().needs_mass, RKV().needs_keys) == (8, False, True)
