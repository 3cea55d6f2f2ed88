"""Attention over keys in full against NumPy, its masks, and the merging of its parts."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.attention import (
    NEG_INF,
    add_sinks,
    biased_attention,
    causal_mask,
    masked_attention,
    merge,
)

SCALE = 0.3


def draw(seed: int = 0, group: int = 3, keys: int = 9, dtype=jnp.float32):
    """q [B, T, Hq, D], and k and v [B, S, Hkv, D]."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((2, 5, 2 * group, 8))
    k, v = rng.standard_normal((2, 2, keys, 2, 8))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v + 1))


def by_head(x):
    return x.swapaxes(1, 2)


def oracle(q, k, v, bias, sinks=None):
    """Float64, a query at a time; ``bias`` is [B, Hkv, T, S], ``sinks`` an extra column."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    bias = np.broadcast_to(bias, (q.shape[0], k.shape[2], q.shape[1], k.shape[1]))
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    group = q.shape[2] // k.shape[2]
    for row, token, head in np.ndindex(q.shape[:3]):
        seen = np.flatnonzero(bias[row, head // group, token] > -np.inf)
        logits = k[row, seen, head // group] @ q[row, token, head] * SCALE
        logits = logits + bias[row, head // group, token, seen]
        values = v[row, seen, head // group]
        if sinks is not None:
            logits = np.append(logits, float(sinks[head]))
            values = np.append(values, np.zeros((1, 8)), 0)
        if len(logits):
            lse[row, token, head] = np.logaddexp.reduce(logits)
            out[row, token, head] = np.exp(logits - lse[row, token, head]) @ values
    return out, lse


def check(actual, expected, tolerance=1e-5):
    out, lse = actual
    assert out.dtype == lse.dtype == jnp.float32
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=tolerance)
    dead = np.isneginf(expected[1])
    np.testing.assert_allclose(lse[~dead], expected[1][~dead], rtol=0, atol=1e-5)
    assert (np.asarray(lse)[dead] == np.float32(NEG_INF)).all()
    assert (np.asarray(out)[dead] == 0).all()


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("shape", [(2, 2, 5, 9), (1, 1, 1, 9), (2, 1, 5, 9), (1, 2, 1, 9)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_biased_attention(group, shape, dtype):
    q, k, v = draw(group=group, dtype=dtype)
    bias = np.random.default_rng(1).choice([0, -np.inf, 2.5, -1], shape).astype(np.float32)
    if shape[2] > 1:
        bias[0, 0, 2] = -np.inf  # one query that sees nothing
    actual = biased_attention(q, by_head(k), by_head(v), jnp.asarray(bias), SCALE)
    check(actual, oracle(q, k, v, bias), 1e-5 if dtype == jnp.float32 else 1.5e-2)


def test_hidden_keys_may_hold_any_finite_number():
    q, k, v = draw()
    bias = jnp.zeros((2, 1, 1, 9)).at[:, :, :, 4].set(-jnp.inf)
    expected = biased_attention(q, by_head(k), by_head(v), bias, SCALE)
    k, v = k.at[:, 4].set(3e38), v.at[:, 4].set(-3e38)
    actual = biased_attention(q, by_head(k), by_head(v), bias, SCALE)
    for left, right in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(left, right)


def test_large_logits_do_not_overflow():
    q, k, v = draw()
    out, lse = biased_attention(100 * q, by_head(100 * k), by_head(v), jnp.zeros((1, 1, 1, 9)), 1.0)
    best = np.einsum("bthgd,bshd->bthgs", 1e4 * q.reshape(2, 5, 2, 3, 8), k).max(-1)
    np.testing.assert_allclose(lse.reshape(best.shape), best, rtol=1e-3)
    assert np.isfinite(out).all() and np.abs(out).max() <= np.abs(v).max() + 1e-4


def test_masked_attention_sees_where_the_mask_is_true():
    q, k, v = draw()
    mask = np.random.default_rng(2).random((2, 5, 9)) < 0.5
    mask[1, 3] = False
    expected = oracle(q, k, v, np.where(mask, 0, -np.inf)[:, None])
    check(masked_attention(q, k, v, jnp.asarray(mask), SCALE), expected)


@pytest.mark.parametrize("window", [None, 1, 4, 5, 6, 100])
def test_causal_mask(window):
    query_pos, key_pos = np.array([[4, 5], [5, 0]]), np.array([[0, 5, 1, -1], [3, -1, 6, 0]])
    mask = causal_mask(jnp.asarray(query_pos, jnp.int32), jnp.asarray(key_pos, jnp.int32), window)
    assert mask.shape == (2, 2, 4)
    for row, query, key in np.ndindex(mask.shape):
        at, of = key_pos[row, key], query_pos[row, query]
        seen = 0 <= at <= of and (window is None or at > of - window)
        assert mask[row, query, key] == seen, (window, of, at)


def test_parts_merge_into_the_whole():
    q, k, v = draw(keys=9)
    bias = np.random.default_rng(3).choice([0, -np.inf, 1.5], (2, 2, 5, 9)).astype(np.float32)
    bias[0, :, 1, :4] = bias[1, :, 2, 4:] = bias[1, :, 3] = -np.inf  # either part may be empty
    parts = [
        biased_attention(
            q, by_head(k[:, cut]), by_head(v[:, cut]), jnp.asarray(bias[:, :, :, cut]), SCALE
        )
        for cut in (slice(4), slice(4, 9))
    ]
    out, lse = merge(*parts[0], *parts[1])
    expected = oracle(q, k, v, bias)
    dead = np.isneginf(expected[1])
    assert dead.any()
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse[~dead], expected[1][~dead], rtol=0, atol=1e-5)
    assert (np.asarray(lse)[dead] < NEG_INF / 2).all()
    swapped = merge(*parts[1], *parts[0])
    np.testing.assert_allclose(swapped[0], out, rtol=0, atol=1e-6)


def test_merging_with_nothing_changes_nothing():
    q, k, v = draw()
    out, lse = biased_attention(q, by_head(k), by_head(v), jnp.zeros((1, 1, 1, 9)), SCALE)
    merged = merge(jnp.zeros_like(out), jnp.full_like(lse, NEG_INF), out, lse)
    np.testing.assert_array_equal(merged[0], out)
    np.testing.assert_array_equal(merged[1], lse)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_sink_is_a_column_without_a_value(dtype):
    q, k, v = draw()
    bias = np.zeros((2, 1, 5, 9), np.float32)
    bias[0, :, 2] = -np.inf
    sinks = jnp.asarray(np.linspace(-3, 4, 6), dtype)
    out, lse = biased_attention(q, by_head(k), by_head(v), jnp.asarray(bias), SCALE)
    actual = add_sinks(out, lse, sinks)
    expected, _ = oracle(q, k, v, bias, np.asarray(sinks, np.float32))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
    assert (np.asarray(actual)[0, 2] == 0).all()
    np.testing.assert_array_equal(add_sinks(out, lse, None), out)
