"""MatryoshkaKV's forward pass and first bases, against attention spelled out in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.dynakv.forward import read
from kvjax.dynakv.spectrum import turned
from kvjax.train.matryoshka.projections import principal_projections
from tests.dynakv.tiny import tiny, tokens
from tests.train.matryoshka_cases import drawn, logits, shape_of

SLOW = pytest.mark.slow
SINKS = pytest.param("gpt_oss", 2, marks=SLOW)  # and sliding windows


@pytest.mark.parametrize(("family", "layers"), [("llama", 2), ("qwen3", 1), SINKS])
def test_all_components_are_the_model_as_it_is(family, layers):
    lm = tiny(family, layers)
    ids = tokens(lm, (2, 12))
    projections, _ = drawn(lm)
    whole = np.full(shape_of(lm), lm.config.head_dim, np.int32)
    found = logits(lm.model, projections, whole, ids)
    np.testing.assert_allclose(found, kvjax.forward(lm, ids), atol=1e-4)


def oracle(lm, projections, ranks, index, q, k, v, sinks):
    """Scores of what is stored and of the mean, one head, row and query at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    u, mean = (np.asarray(x, np.float64)[index] for x in projections)
    out = np.zeros(q.shape)
    for row, t, head in np.ndindex(*q.shape[:3]):
        h = head // lm.config.group
        uk, uv = (u[part, h][:, : ranks[index, part, h]] for part in range(2))
        past = slice(max(0, t + 1 - (lm.config.windows[index] or t + 1)), t + 1)
        query, stored = q[row, t, head] @ uk, (k[row, past, h] - mean[0, h]) @ uk
        scores = (stored @ query + q[row, t, head] @ mean[0, h]) * lm.config.scale
        weights = np.exp(scores)
        total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[head])))
        weights = weights / total
        latent = weights @ ((v[row, past, h] - mean[1, h]) @ uv)
        out[row, t, head] = latent @ uv.T + weights.sum() * mean[1, h]
    return jnp.asarray(out, jnp.float32)


@pytest.mark.parametrize(
    ("family", "layers"), [("llama", 2), pytest.param("qwen3", 1, marks=SLOW), SINKS]
)
def test_each_head_reads_its_own_first_components(family, layers):
    lm = tiny(family, layers)
    ids = tokens(lm, (2, 12))
    projections, ranks = drawn(lm)

    def attend(index, module, angles, own, q, k, v, sinks):
        def plain(number, *arrays):
            return np.float32(oracle(lm, projections, ranks, int(number), *arrays))

        shape = jax.ShapeDtypeStruct(q.shape, jnp.float32)
        return jax.pure_callback(plain, shape, own, q, k, v, sinks), None

    hidden, _ = read(lm.model, jnp.asarray(ids), attend, list(jnp.arange(layers)), keys="rotated")
    found = logits(lm.model, projections, ranks, ids)
    np.testing.assert_allclose(found, lm.model.logits(hidden), atol=2e-4)
    whole = np.full(shape_of(lm), lm.config.head_dim, np.int32)
    assert np.abs(found - logits(lm.model, projections, whole, ids)).max() > 0.1


def test_first_bases_are_of_rotated_keys_and_of_values_head_by_head():
    lm = tiny("qwen3")
    ids = tokens(lm, (2, 24), seed=3)
    valid = np.arange(24)[None] < np.array([[24], [17]])

    def attend(index, module, angles, own, q, k, v, sinks):
        return q, (k, v)

    _, seen = read(lm.model, jnp.asarray(ids), attend, (None,), keys="rotated")
    found = principal_projections(lm.model, [(ids[:1], valid[:1]), (ids[1:], valid[1:])])
    for part, x in enumerate(np.asarray(x, np.float64)[valid] for x in seen[0]):  # [N, Hkv, D]
        for head in range(shape_of(lm)[2]):
            own, u = x[:, head], np.asarray(found.u[0, part, head], np.float64)
            np.testing.assert_allclose(found.mean[0, part, head], own.mean(0), atol=1e-4)
            spread = u.T @ np.cov(own.T, bias=True) @ u
            variance = np.diag(spread)
            assert (np.diff(variance) <= 1e-5 * variance[0]).all()
            assert np.abs(spread - np.diag(variance)).max() < 1e-4 * variance[0]
            assert np.abs(u.T @ u - np.eye(len(u))).max() < 1e-5


def test_turning_keeps_a_basis_orthogonal_and_its_orientation():
    rng = np.random.default_rng(0)
    u = np.linalg.qr(rng.standard_normal((2, 3, 8, 8)))[0].astype(np.float32)
    turn = rng.standard_normal((2, 3, 8, 8)).astype(np.float32)
    found = np.asarray(jax.jit(turned)(u, turn), np.float64)
    assert np.abs(found.mT @ found - np.eye(8)).max() < 1e-5
    np.testing.assert_allclose(np.linalg.det(found), np.linalg.det(u), rtol=1e-4)
    skew = turn.astype(np.float64) - turn.mT
    wanted = u @ np.linalg.inv(np.eye(8) - skew / 2) @ (np.eye(8) + skew / 2)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    np.testing.assert_array_equal(turned(jnp.asarray(u), jnp.zeros_like(turn)), u)
