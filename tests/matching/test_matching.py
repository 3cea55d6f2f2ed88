"""What attention matching must keep, and what it must leave alone."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import UsageError
from kvjax.matching import AttentionMatching, match_errors
from kvjax.models.attention import biased_attention, merge
from tests.compress import layer
from tests.matching import caches

ROBUST, FAITHFUL = AttentionMatching(queries=4096), AttentionMatching(4096, mode="faithful")
BOTH = pytest.mark.parametrize("matching", [ROBUST, FAITHFUL], ids=["robust", "faithful"])
EVICTION = AttentionMatching(4096, fit_bias=False, fit_values=False)


@functools.cache
def ragged(group: int = 2):
    """Rows of many lengths, some without tokens or queries; every third token stays."""
    ctx = layer.build(group, seed=3)
    keep = ctx.live & (ctx.pos % 3 != 1)
    return ctx, keep, ctx.must & keep


@functools.cache
def matched(matching, group: int = 2, count: int = 37):
    return caches.match(matching, *ragged(group), count)


def at_slots(ctx, fitted):
    """The bias and values of the fitted slots, by slot; those of ``ctx`` elsewhere."""
    bias, v = np.array(ctx.bias), np.array(ctx.v)
    for row, head in np.ndindex(bias.shape[:2]):
        valid = np.asarray(fitted.valid)[row, head]
        at = np.asarray(fitted.index)[row, head][valid]
        bias[row, head, at] = np.asarray(fitted.bias)[row, head][valid]
        v[row, head, at] = np.asarray(fitted.v)[row, head][valid]
    return bias, v


@BOTH
def test_shapes_and_padding(matching):
    ctx, keep, _ = ragged()
    fitted = matched(matching)
    shape = (*ctx.bias.shape[:2], 37)
    assert [x.shape for x in jax.tree.leaves(fitted)] == [shape] * 3 + [(*shape, layer.DIM)]
    assert [x.dtype.name for x in jax.tree.leaves(fitted)] == ["int32", "bool", *["float32"] * 2]
    for row, head in np.ndindex(shape[:2]):
        stays = np.flatnonzero(keep[row, head])
        np.testing.assert_array_equal(fitted.index[row, head, : len(stays)], stays)
        assert np.asarray(fitted.valid[row, head]).tolist() == [i < len(stays) for i in range(37)]
    assert np.isfinite(fitted.v).all() and not np.asarray(fitted.v)[~fitted.valid].any()
    assert (np.asarray(fitted.bias)[~fitted.valid] == -np.inf).all()
    assert np.isfinite(np.asarray(fitted.bias)[fitted.valid]).all()


@BOTH
def test_fixed_slots_and_rows_without_queries_stay_bit_for_bit(matching):
    ctx, keep, fixed = ragged()
    bias, v = at_slots(ctx, matched(matching))
    asked = np.asarray(ctx.query_pos >= 0).any(1)[:, None, None]
    same = np.asarray(fixed) | (np.asarray(keep) & ~asked)
    assert same.sum() > 40
    np.testing.assert_array_equal(bias[same], np.asarray(ctx.bias)[same])
    np.testing.assert_array_equal(v[same], np.asarray(ctx.v)[same])
    other = np.asarray(keep) & ~same
    assert (bias[other] != np.asarray(ctx.bias)[other]).mean() > 0.9
    assert (v[other] != np.asarray(ctx.v)[other]).mean() > 0.9


def oracle(matching, ctx, keep, fixed, row, head):
    """Bias and values by slot in float64, for a head with kept tokens and queries."""
    whole = caches.plain(ctx, head, row=row)
    at = np.flatnonzero(ctx.live[row, head])
    seen = whole.logits > -np.inf
    e = np.where(seen, np.exp(whole.logits - whole.shift), 0)
    stays = np.asarray(keep)[row, head, at]
    free = stays & ~np.asarray(fixed)[row, head, at] & seen.any(0)
    held = stays & ~free
    a, b = e[:, free], e.sum(1) - e[:, held].sum(1)
    top = eigenvalue(a)
    one = np.clip(a.sum(1) @ b / (a.sum(1) @ a.sum(1)), *matching.bounds)
    eye = np.eye(free.sum())
    w = one + np.linalg.solve(a.T @ a + matching.ridge_bias * top * eye, a.T @ (b - one * a.sum(1)))
    bias = np.asarray(ctx.bias)[row, head, at].astype(float)
    bias[free] = np.clip(bias[free] + np.log(np.clip(w, *matching.bounds)), *matching.total)
    logits = whole.logits[:, stays] + (bias - np.asarray(ctx.bias)[row, head, at])[stays]
    x = np.exp(logits - logits.max(1, keepdims=True).clip(-1e9))
    x /= x.sum(1, keepdims=True).clip(1e-30)
    v = whole.v.copy()
    z = x[:, free[stays]]
    y = whole.outputs - x @ v[stays]
    v[free] += np.linalg.solve(z.T @ z + matching.ridge_values * eigenvalue(z) * eye, z.T @ y)
    return at[stays], bias[stays], v[stays]


def eigenvalue(a):
    x = np.ones(a.shape[1])
    for _ in range(3):
        x = a.T @ (a @ x)
        x /= np.linalg.norm(x)
    return np.linalg.norm(a @ x) ** 2


@pytest.mark.parametrize("group", [1, 2])
def test_the_robust_fit_in_float64(group):
    """Old biases, fixed slots, queries in the midst of the tokens, NaN in all that is not there."""
    ctx, keep, fixed = ragged(group)
    bias, v = at_slots(ctx, matched(ROBUST, group))
    checked = 0
    for row, head in np.ndindex(bias.shape[:2]):
        if not (keep & ~fixed)[row, head].any() or int(ctx.query_pos[row].max()) < 0:
            continue
        at, expected, values = oracle(ROBUST, ctx, keep, fixed, row, head)
        np.testing.assert_allclose(bias[row, head, at], expected, rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(v[row, head, at], values, rtol=5e-3, atol=5e-3)
        checked += 1
    assert checked >= 9


class TestIdentity:
    """All tokens stay: nothing may change, whatever biases the cache carries."""

    @pytest.mark.parametrize("mode", ["robust", "faithful"])
    def test_nothing_changes(self, mode):
        ctx = biased(caches.clustered(1, 30, 100))  # 200 queries, most of which see all
        ctx = dataclasses.replace(ctx, query_pos=ctx.query_pos + 100)
        matching = dataclasses.replace(ROBUST, mode=mode)
        fitted = caches.match(matching, ctx, ctx.live, caches.nothing(ctx), 30)
        bias, v = at_slots(ctx, fitted)
        live = np.asarray(ctx.live)
        tight = {"robust": 1e-5, "faithful": 2e-3}[mode]
        np.testing.assert_allclose(bias[live], np.asarray(ctx.bias)[live], atol=tight)
        np.testing.assert_allclose(v[live], np.asarray(ctx.v)[live], atol=10 * tight)
        assert abs(caches.errors(ctx, fitted)[[0, 2]]).max() < 1e-4

    @BOTH
    def test_a_forgotten_bias_shows(self, matching):
        ctx = biased(caches.clustered(1, 30, 100))
        ctx = dataclasses.replace(ctx, query_pos=ctx.query_pos + 100)
        released = dataclasses.replace(matching, carry_bias=False, fit_values=False)
        fitted = caches.match(released, ctx, ctx.live, caches.nothing(ctx), 30)
        assert abs(caches.errors(ctx, fitted)[0]) > 0.2

    @BOTH
    def test_fewer_queries_than_tokens_are_met_exactly(self, matching):
        ctx = caches.clustered(2, 60, 10)
        fitted = caches.match(matching, ctx, ctx.live, caches.nothing(ctx), 60)
        assert caches.errors(ctx, fitted)[2] < 2e-3


def biased(ctx):
    """The same tokens, each of which stands for more or less than itself."""
    wave = 0.4 + 0.8 * jnp.sin(ctx.pos.astype(jnp.float32))
    return dataclasses.replace(ctx, bias=jnp.where(ctx.live, wave, ctx.bias))


def drift(matching, rounds: int, size: int, step: int) -> list[float]:
    """Log mass of the whole history after every round of a growing cache, on unseen queries."""
    whole, queries = caches.pair(5, size + rounds * step, 4 * size, 4 * size)
    held = dataclasses.replace(whole, bias=jnp.where(whole.pos < size, whole.bias, -jnp.inf))
    found = []
    for turn in range(1, rounds + 1):
        fresh = (whole.pos >= size + (turn - 1) * step) & (whole.pos < size + turn * step)
        held = dataclasses.replace(held, bias=jnp.where(fresh & whole.live, 0, held.bias))
        keep = caches.best(held, size)
        fitted = caches.match(matching, held, keep, caches.nothing(held), size)
        bias, v = at_slots(held, fitted)
        bias = np.where(np.asarray(keep), bias, -np.inf)
        held = dataclasses.replace(held, bias=jnp.asarray(bias), v=jnp.asarray(v))
        read = whole.pos < size + turn * step
        known = dataclasses.replace(queries, bias=jnp.where(read, whole.bias, -jnp.inf))
        left = dataclasses.replace(known, bias=held.bias)
        ratio = [
            np.mean(log_mass(caches.plain(left, h)) - log_mass(caches.plain(known, h)))
            for h in range(caches.HEADS)
        ]
        found.append(float(np.mean(ratio)))
    return found


def log_mass(attention) -> np.ndarray:
    return np.log(np.exp(attention.logits - attention.shift).sum(1)) + attention.shift[:, 0]


@pytest.mark.slow
def test_mass_does_not_drift_over_six_rounds():
    assert np.abs(drift(FAITHFUL, 6, 256, 128)).max() < 0.02
    forgotten = drift(dataclasses.replace(FAITHFUL, carry_bias=False), 6, 256, 128)
    assert forgotten[-1] < -0.1


def test_mass_does_not_drift_over_two_rounds():
    assert np.abs(drift(FAITHFUL, 2, 128, 64)).max() < 0.02


class TestNothingElseMatters:
    def test_the_order_of_slots_and_what_free_ones_hold(self):
        ctx, keep, fixed = ragged()
        bias, v = at_slots(ctx, matched(ROBUST))
        wide = layer.widened(ctx, before=7, after=4)
        order = np.random.default_rng(0).permuted(
            np.broadcast_to(np.arange(wide.bias.shape[2]), wide.bias.shape), axis=2
        )
        masks = [np.pad(np.asarray(x), ((0, 0), (0, 0), (7, 4))) for x in (keep, fixed)]
        masks = [jnp.asarray(np.take_along_axis(x, order, 2)) for x in masks]
        moved = layer.permuted(wide, order)
        other_bias, other_v = at_slots(moved, caches.match(ROBUST, moved, *masks, 41))
        back, live = np.argsort(order, axis=2)[:, :, 7:-4], np.asarray(ctx.live)
        other_bias = np.take_along_axis(other_bias, back, 2)[live]
        other_v = np.take_along_axis(other_v, back[..., None], 2)[live]
        np.testing.assert_allclose(other_bias, bias[live], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(other_v, v[live], rtol=1e-4, atol=1e-4)

    def test_more_places_than_slots(self):
        ctx, keep, fixed = ragged()
        base, other = matched(ROBUST), caches.match(ROBUST, ctx, keep, fixed, layer.SLOTS + 3)
        assert not other.valid[:, :, 37:].any()
        assert other.v.shape[2] == layer.SLOTS + 3
        np.testing.assert_allclose(other.bias[:, :, :37], base.bias, rtol=1e-4, atol=1e-4)

    def test_a_row_alone(self):
        ctx, keep, fixed = ragged()
        together = matched(ROBUST)
        for row in (0, 3, 6):
            one = slice(row, row + 1)
            alone = caches.match(ROBUST, layer.row_of(ctx, row), keep[one], fixed[one], 37)
            np.testing.assert_allclose(alone.bias[0], together.bias[row], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(alone.v[0], together.v[row], rtol=1e-4, atol=1e-5)

    def test_what_other_heads_hold(self):
        ctx, keep, fixed = ragged()
        group = ctx.queries.shape[2] // 2
        changed = dataclasses.replace(
            ctx,
            k=ctx.k.at[:, 1].multiply(0.5),
            v=ctx.v.at[:, 1].multiply(2),
            queries=ctx.queries.at[:, :, group:].multiply(3),
        )
        base, other = matched(ROBUST), caches.match(ROBUST, changed, keep, fixed, 37)
        np.testing.assert_array_equal(other.bias[:, 0], base.bias[:, 0])
        np.testing.assert_array_equal(other.v[:, 0], base.v[:, 0])
        assert (other.bias[0, 1] != base.bias[0, 1]).any()

    def test_queries_before_the_latest(self):
        ctx, keep, fixed = ragged()
        few = dataclasses.replace(ROBUST, queries=6)
        poisoned = jnp.where(
            (ctx.query_pos >= (ctx.length - 6)[:, None])[:, :, None, None], ctx.queries, jnp.nan
        )
        base = caches.match(few, ctx, keep, fixed, 37)
        other = caches.match(few, dataclasses.replace(ctx, queries=poisoned), keep, fixed, 37)
        np.testing.assert_array_equal(other.bias, base.bias)
        np.testing.assert_array_equal(other.v, base.v)
        assert (base.bias[0] != matched(ROBUST).bias[0]).any()

    def test_tokens_after_a_query(self):
        """A head of tokens that no query sees keeps them as they are."""
        ctx, keep, fixed = ragged()
        late = dataclasses.replace(ctx, query_pos=jnp.where(ctx.query_pos >= 0, 20, -1))
        fitted = caches.match(ROBUST, late, keep, fixed, 37)
        bias, v = at_slots(late, fitted)
        unseen = np.asarray(keep & (ctx.pos > 20))
        assert unseen.sum() > 100
        np.testing.assert_array_equal(bias[unseen], np.asarray(ctx.bias)[unseen])
        np.testing.assert_array_equal(v[unseen], np.asarray(ctx.v)[unseen])
        # and they are no part of what is matched
        other = dataclasses.replace(late, k=jnp.where((ctx.pos > 20)[..., None], -ctx.k, ctx.k))
        again = caches.match(ROBUST, other, keep, fixed, 37)
        np.testing.assert_array_equal(again.bias, fitted.bias)
        np.testing.assert_array_equal(again.v, fitted.v)

    def test_a_constant_added_to_the_logits_of_a_query(self):
        """Also one of 1000 does not overflow."""
        ctx = caches.clustered(4, 100, 40)
        keep = caches.best(ctx, 37)
        base = caches.match(ROBUST, raised(ctx, 0), keep, caches.nothing(ctx), 37)
        for height, tight in ((64, 2e-3), (1000, 0.05)):
            moved = caches.match(ROBUST, raised(ctx, height), keep, caches.nothing(ctx), 37)
            np.testing.assert_allclose(moved.bias, base.bias, rtol=tight, atol=tight)
            np.testing.assert_allclose(moved.v, base.v, rtol=tight, atol=4 * tight)

    def test_low_precision_is_widened(self):
        ctx, keep, fixed = ragged()
        low = dataclasses.replace(
            ctx, **{name: getattr(ctx, name).astype(jnp.bfloat16) for name in ("k", "v", "queries")}
        )
        wide = dataclasses.replace(
            low, **{name: getattr(low, name).astype(jnp.float32) for name in ("k", "v", "queries")}
        )
        a, b = (caches.match(ROBUST, x, keep, fixed, 37) for x in (low, wide))
        np.testing.assert_array_equal(a.bias, b.bias)
        np.testing.assert_array_equal(a.v, b.v)


def raised(ctx, height):
    """Another channel, of 1 in all keys and of a height of their own in the queries."""
    shape = ctx.queries.shape[:3]
    heights = height * jnp.linspace(0.5, 1, math.prod(shape), dtype=jnp.float32) / ctx.scale
    more = ((0, 0),) * 3 + ((0, 1),)
    return dataclasses.replace(
        ctx,
        k=jnp.pad(ctx.k, more, constant_values=1),
        v=jnp.pad(ctx.v, more),
        queries=jnp.concatenate([ctx.queries, heights.reshape(*shape, 1)], 3),
    )


def test_heads_of_a_group_are_fitted_together():
    """As one head would be that is asked all of their queries."""
    ctx, keep, fixed = ragged(2)
    rows, count, _, dim = ctx.queries.shape
    grouped = ctx.queries.reshape(rows, count, 2, 2, dim).transpose(0, 3, 1, 2, 4)
    one = dataclasses.replace(
        ctx,
        queries=grouped.reshape(rows, 2 * count, 2, dim),
        query_pos=jnp.concatenate([ctx.query_pos] * 2, 1),
    )
    base, other = matched(ROBUST), caches.match(ROBUST, one, keep, fixed, 37)
    np.testing.assert_allclose(other.bias, base.bias, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(other.v, base.v, rtol=1e-4, atol=1e-4)


def test_keys_as_they_are_stored():
    """The kept side sees them, the target does not, and a fixed one's error is made up for."""
    ctx, keep, fixed = ragged(2)
    stored = jnp.round(ctx.k * 2) / 2
    run = jax.jit(lambda k: ROBUST(ctx, keep, fixed, 37, k))
    found, same = run(stored), run(ctx.k)
    np.testing.assert_allclose(same.bias, matched(ROBUST).bias, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(same.v, matched(ROBUST).v, rtol=1e-3, atol=1e-3)
    measure = jax.jit(match_errors)
    aware = measure(ctx, found, stored)
    unaware = measure(ctx, same, stored)
    assert float(aware.output.mean()) < 0.9 * float(unaware.output.mean())


class TestDeployed:
    """In the attention of the decoder, a bias added to the logits."""

    @functools.cache  # noqa: B019
    def fitted(self):
        ctx = caches.clustered(6, 100, 40)
        return ctx, caches.match(ROBUST, ctx, caches.best(ctx, 30), caches.nothing(ctx), 37)

    @functools.partial(jax.jit, static_argnames=("self", "own"))
    def attend(self, ctx, fitted, queries, k=None, v=None, own=0):
        """Over the fitted slots and ``k``, causal among the last ``own`` of these."""
        index = jnp.asarray(fitted.index)[..., None]
        keys = jnp.where(fitted.valid[..., None], jnp.take_along_axis(ctx.k, index, 2), 0)
        bias = jnp.broadcast_to(fitted.bias[:, :, None], (1, 2, queries.shape[1], keys.shape[2]))
        if k is not None:
            shape = (1, 2, queries.shape[1], k.shape[2])
            late = ~jnp.tri(shape[2], shape[3], shape[3] - own, dtype=bool)
            causal = jnp.where(late, -jnp.inf, 0.0)[None, None]
            bias = jnp.concatenate([bias, jnp.broadcast_to(causal, shape)], 3)
            keys, v = jnp.concatenate([keys, k], 2), jnp.concatenate([fitted.v, v], 2)
        return biased_attention(queries, keys, fitted.v if v is None else v, bias, ctx.scale)

    def test_like_plain_attention_in_float64(self):
        ctx, fitted = self.fitted()
        after = dataclasses.replace(ctx, query_pos=ctx.query_pos + 100)
        out, _ = self.attend(after, fitted, after.queries)
        for head in range(2):
            expected = caches.plain(after, head, fitted).outputs.reshape(2, 40, -1)
            got = np.asarray(out)[0, :, 2 * head : 2 * head + 2].swapaxes(0, 1)
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("count", [1, 6])
    def test_what_is_kept_and_what_follows_are_two_parts_of_one_softmax(self, count):
        ctx, fitted = self.fitted()
        rng = np.random.default_rng(0)
        k, v = (jnp.asarray(rng.standard_normal((1, 2, count, 16)), jnp.float32) for _ in "kv")
        queries = ctx.queries[:, -count:]
        together, lse = self.attend(ctx, fitted, queries, k, v, own=count)
        late = jnp.where(jnp.tri(count, dtype=bool), 0.0, -jnp.inf)[None, None]
        part = biased_attention(queries, k, v, late, ctx.scale)
        out, merged = merge(*self.attend(ctx, fitted, queries), *part)
        np.testing.assert_allclose(together, out, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(lse, merged, rtol=1e-5, atol=1e-5)


@functools.cache
def held_out(matching, kept: int, positions: int) -> np.ndarray:
    """Log mass, mass and output of queries that were not fitted; each group has two heads."""
    fit, other = caches.pair(7, 256, positions, 256)
    fitted = caches.match(matching, fit, caches.best(fit, kept), caches.nothing(fit), 128)
    return caches.errors(other, fitted)


def test_what_was_not_fitted_is_the_nearer_the_more_is_kept():
    sizes = (12, 25, 50, 125)
    evicted, found = (
        np.array([held_out(m, kept, 256) for kept in sizes]) for m in (EVICTION, ROBUST)
    )
    for errors in (evicted, found):
        assert (np.diff(errors[:, 1:], axis=0) < 0).all()
    assert (evicted[:, 0] < -0.05).all()  # without a bias mass is missing, always
    assert (found[:, 1:] < evicted[:, 1:]).all()
    assert (abs(found[1:, 0]) < 0.5 * abs(evicted[1:, 0])).all()


@pytest.mark.parametrize(
    ("kept", "positions"),
    [(50, 24), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((50, 8), (125, 8), (125, 50)))],
)
def test_fewer_queries_than_tokens(kept, positions):
    """Robust: hardly ever worse than eviction. Released: exact on what was fitted alone."""
    errors = {m: held_out(m, kept, positions) for m in (ROBUST, FAITHFUL, EVICTION)}
    assert np.isfinite(list(errors.values())).all()
    assert (errors[ROBUST][1:] <= 1.05 * errors[EVICTION][1:]).all()
    fit, _ = caches.pair(7, 256, positions, 256)
    fitted = caches.match(FAITHFUL, fit, caches.best(fit, kept), caches.nothing(fit), 128)
    assert caches.errors(fit, fitted)[2] < 0.2 * errors[FAITHFUL][2]


def test_errors_are_those_of_plain_attention():
    ctx = ragged()[0]
    fitted = matched(ROBUST)
    found = jax.jit(match_errors)(ctx, fitted)
    for row, head in ((0, 0), (0, 1), (1, 0), (7, 1)):
        whole, kept = caches.plain(ctx, head, row=row), caches.plain(ctx, head, fitted, row)
        ratio = log_mass(kept) - log_mass(whole)
        error = np.linalg.norm(kept.outputs - whole.outputs) / np.linalg.norm(whole.outputs)
        got = [float(x[row, head]) for x in (found.log_mass, found.mass, found.output)]
        expected = [ratio.mean(), np.abs(np.expm1(ratio)).mean(), error]
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5)
    for row in (5, 6):  # without tokens, without queries
        assert [float(x[row].max()) for x in (found.log_mass, found.mass, found.output)] == [0] * 3


class TestParameters:
    def test_one_weight_for_all(self):
        ctx, keep, fixed = ragged()
        bias, _ = at_slots(ctx, matched(dataclasses.replace(ROBUST, fit_bias="scalar")))
        for row, head in ((0, 0), (0, 1), (1, 1)):
            free = np.asarray(keep & ~fixed)[row, head]
            added = bias[row, head, free] - np.asarray(ctx.bias)[row, head, free]
            assert np.ptp(added) < 1e-5 < 0.01 < added.mean()

    def test_nothing_is_fitted(self):
        ctx, _, _ = ragged()
        bias, v = at_slots(ctx, matched(EVICTION))
        np.testing.assert_array_equal(bias, ctx.bias)
        np.testing.assert_array_equal(v, ctx.v)

    def test_values_stay_without_being_given(self):
        ctx, keep, fixed = ragged()
        only_bias = dataclasses.replace(ROBUST, fit_values=False)
        fitted = caches.match(only_bias, dataclasses.replace(ctx, v=None), keep, fixed, 37)
        assert fitted.v is None
        np.testing.assert_array_equal(fitted.bias, matched(ROBUST).bias)
        assert (ROBUST.needs_values, only_bias.needs_values) == (True, False)

    def test_limits_of_a_weight_and_of_the_whole_bias(self):
        ctx, keep, fixed = ragged()
        tight = dataclasses.replace(ROBUST, bounds=(0.9, 1.2), total=(-1.0, 0.1))
        bias, _ = at_slots(ctx, matched(tight))
        free = np.asarray(keep & ~fixed & (ctx.query_pos >= 0).any(1)[:, None, None])
        old = np.asarray(ctx.bias)[free]
        assert (bias[free] == np.clip(bias[free], -1, np.float32(0.1))).all()
        inside = (bias[free] > -1) & (bias[free] < 0.1)
        added = (bias[free] - old)[inside]
        assert inside.sum() > 10
        assert np.log(0.9) - 1e-6 <= added.min() and added.max() <= np.log(1.2) + 1e-6

    def test_relative_weighting_meets_the_ratio_of_masses(self):
        absolute, relative = (
            held_out(dataclasses.replace(ROBUST, relative=flag), 50, 256) for flag in (False, True)
        )
        assert relative[1] < 0.97 * absolute[1]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"queries": 0}, "queries must be at least 1, got 0"),
            ({"mode": "exact"}, "mode must be 'robust' or 'faithful', got 'exact'"),
            ({"fit_bias": "one"}, "fit_bias must be True, 'scalar' or False, got 'one'"),
            ({"bounds": (0.0, 2.0)}, "bounds must be above 0"),
            ({"bounds": (2.0, 3.0)}, "hold 1 between them"),
            ({"total": (1.0, 3.0)}, "total must hold 0"),
            ({"ridge_bias": 0.0}, "ridge_bias must be above 0, got 0.0"),
            ({"ridge_values": -1.0}, "ridge_values must be above 0, got -1.0"),
            ({"steps": -1}, "steps must be at least 0, got -1"),
        ],
    )
    def test_those_that_cannot_be_used_are_refused(self, unchecked, options, message):
        with pytest.raises(UsageError, match=message):
            AttentionMatching(**options)
