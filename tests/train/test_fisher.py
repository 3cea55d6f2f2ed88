"""Palu's ranks, and that what it factorises is what principal components keep."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import kvjax
from kvjax.dynakv.adapter import load_adapter
from kvjax.dynakv.projector import Projector
from kvjax.dynakv.settings import SpectralSettings
from kvjax.errors import NumericalError, UsageError
from kvjax.train.dynakv.fisher import fisher_ranks, fisher_scores
from kvjax.train.dynakv.loop import train
from tests.dynakv.tiny import WIDTH, fitted, tiny, tokens
from tests.train.small import SETTINGS, rows

FIXED = SpectralSettings(gate="fixed", key_rank=6, value_rank=4)


@pytest.fixture(scope="module")
def ids():
    return tokens(tiny("llama", 2), (3, 10), seed=4)


@pytest.fixture(scope="module")
def scores(ids):
    valid = np.ones(ids.shape, bool)
    return fisher_scores(tiny("llama", 2).model, [(ids[:2], valid[:2]), (ids[2:], valid[2:])])


def test_scores_are_root_mean_squares_of_gradients(ids, scores):
    """Against gradients of Optax's loss on the decoder's own logits, for one row at a time."""
    lm = tiny("llama", 2)
    graph, state = nnx.split(lm.model)

    def gradient(row):
        def loss(state):
            logits = kvjax.forward(dataclasses.replace(lm, model=nnx.merge(graph, state)), [row])
            each = optax.softmax_cross_entropy_with_integer_labels(logits[0, :-1], row[1:])
            return each.mean()

        return jax.grad(loss)(state)

    found = [gradient(row) for row in ids]
    for layer in range(2):
        qkv = np.stack([np.asarray(one["layers"][layer]["attn"]["qkv"][...]) for one in found])
        root = np.sqrt(np.square(qkv).mean(0))
        assert root.shape[1] == lm.config.group + 2
        wanted = [root[:, -2].mean(), root[:, -1].mean()]
        np.testing.assert_allclose(scores[layer], wanted, rtol=1e-4)


def test_ranks_share_out_the_budget_in_proportion(ids, scores):
    lm, valid = tiny("llama", 2), np.ones(ids.shape, bool)
    found = fisher_ranks(lm.model, [(ids, valid)], FIXED)
    ranks = np.array([found.key_rank, found.value_rank]).T
    assert ranks.sum() == 2 * (6 + 4)
    exact = 20 * scores / scores.sum()
    assert (exact.max() < WIDTH) and (np.abs(ranks - exact) < 1).all()
    assert found.ranks(1) == tuple(ranks[1])
    even = dataclasses.replace(FIXED, rank_multiple=4)
    multiples = fisher_ranks(lm.model, [(ids, valid)], even)
    assert not any(rank % 4 for rank in multiples.key_rank + multiples.value_rank)
    assert sum(multiples.key_rank + multiples.value_rank) == 20


def test_a_gradient_that_is_no_number_is_refused(ids):
    lm = tiny("llama", 2)
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, nnx.state(lm.model))
    model = nnx.merge(nnx.graphdef(lm.model), broken)
    with pytest.raises(NumericalError, match="gradient"):
        fisher_ranks(model, [(ids, np.ones(ids.shape, bool))], FIXED)


def test_palus_whitened_factors_keep_the_leading_moments():
    """W S = P Sigma Q', cut to r: what the factors make of x is P_r P_r' W x (arXiv 2407.21118)."""
    lm, rank = tiny(), 5
    ids = tokens(lm, (4, 32), seed=9)  # those that `fitted` reads
    layer = lm.model.layers[0]
    hidden = np.asarray(lm.model.embed[...], np.float64)[ids.ravel()]
    root = np.sqrt(np.square(hidden).mean(1, keepdims=True) + lm.config.rms_norm_eps)
    x = hidden / root * np.asarray(layer.input_norm[...], np.float64)
    whole = fitted(lm, gate="fixed", key_rank=rank, value_rank=rank).layers[0]
    weights = np.asarray(layer.attn.qkv[...], np.float64)
    root = np.linalg.cholesky(x.T @ x + 1e-9 * np.eye(x.shape[1]))
    for part, which in ((whole.keys, -2), (whole.values, -1)):
        w = weights[:, which].reshape(WIDTH, -1)
        left, sigma, right = np.linalg.svd(w @ root)
        factor_l = left[:, :rank] * np.sqrt(sigma[:rank])
        factor_r = np.sqrt(sigma[:rank])[:, None] * right[:rank] @ np.linalg.inv(root)
        palu = x @ (factor_l @ factor_r).T
        u = np.asarray(part.u[...], np.float64)[:, :rank]
        ours = x @ w.T @ u @ u.T
        assert np.abs(palu - ours).max() < 1e-4 * np.abs(palu).max()


def test_an_adapter_has_its_ranks_by_layer(tmp_path):
    lm = tiny("llama", 2)
    settings = dataclasses.replace(SETTINGS, steps=0, share_ranks="fisher")
    *_, done = train(lm, rows(), FIXED, settings, tmp_path)
    found = load_adapter(tmp_path, lm).spectra
    assert isinstance(found.settings.key_rank, tuple)
    for index, layer in enumerate(found.layers):
        assert (layer.keys.rank, layer.values.rank) == found.settings.ranks(index)
    assert done.values["rate_hard"] == pytest.approx((6 + 4) / (2 * WIDTH))
    Projector.load(tmp_path, blocks=4).check(lm.config, 16)


@pytest.mark.parametrize("ranks", [(), (3, 0), (3, 17), (3,), (3, 3, 3)])
def test_ranks_that_cannot_be_are_refused(ranks):
    with pytest.raises(UsageError, match=r"^key_rank"):
        SpectralSettings(gate="fixed", key_rank=ranks, value_rank=4).check_width(16, 2)
