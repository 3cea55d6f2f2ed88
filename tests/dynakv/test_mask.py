"""The mask: a tail sum, the paper's flipped running sum, and the rank that follows from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.dynakv.mask import prefix, rank_of, rank_of_logits, soft_mask

WIDTH = 24


def logits(scale: float = 3.0, seed: int = 0) -> jnp.ndarray:
    values = scale * np.random.default_rng(seed).standard_normal((5, 7, WIDTH))
    return jnp.asarray(values, jnp.float32)


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e4])
def test_the_mask_falls_from_one(scale):
    mask = np.asarray(soft_mask(logits(scale)))
    assert (mask[..., 0] == 1).all()
    assert (np.diff(mask, axis=-1) <= 1e-6).all() and (mask >= 0).all()
    assert (mask <= 1 + 1e-6).all()


def test_its_mean_is_the_expected_cut():
    z = logits()
    cut = (np.asarray(jax.nn.softmax(z), np.float64) * np.arange(WIDTH)).sum(-1)
    np.testing.assert_allclose(soft_mask(z).mean(-1), (cut + 1) / WIDTH, rtol=1e-5)


def test_the_flipped_running_sum_is_the_tail_sum_of_renumbered_outputs():
    rng = np.random.default_rng(1)
    x, w, b = rng.standard_normal((6, WIDTH)), rng.standard_normal((WIDTH, WIDTH)), np.ones(WIDTH)
    b = b * rng.standard_normal(WIDTH)
    q = jax.nn.softmax(jnp.asarray(x @ w + b, jnp.float32))
    literal = np.flip(np.cumsum(np.asarray(q), -1), -1)
    renumbered = soft_mask(jnp.asarray(x @ w[:, ::-1] + b[::-1], jnp.float32))
    np.testing.assert_allclose(renumbered, literal, atol=1e-6)


def test_a_rank_is_a_prefix_of_what_the_mask_is_above():
    mask = soft_mask(logits())
    rank = rank_of(mask, 0.1)
    assert rank.min() >= 1
    np.testing.assert_array_equal(prefix(rank, WIDTH), mask > 0.1)


def test_ranks_never_rise_with_tau():
    mask = soft_mask(logits())
    ranks = np.stack([rank_of(mask, tau) for tau in (0.0, 0.05, 0.1, 0.3, 0.5, 0.9, 0.999)])
    assert (np.diff(ranks, axis=0) <= 0).all() and (ranks[-1] < ranks[0]).any()


@pytest.mark.parametrize("multiple", [2, 5, 8, WIDTH])
def test_ranks_are_rounded_up(multiple):
    mask = soft_mask(logits())
    plain, rounded = rank_of(mask, 0.1), rank_of(mask, 0.1, multiple)
    whole = (np.asarray(rounded) % multiple == 0) | (np.asarray(rounded) == WIDTH)
    assert whole.all() and (rounded >= plain).all() and (rounded < plain + multiple).all()


@pytest.mark.parametrize("multiple", [1, 2, 5, 8, WIDTH])
@pytest.mark.parametrize("tau", [0.0, 0.1, 0.5, 0.9])
def test_ranks_without_a_mask_are_the_mask_s(tau, multiple):
    for scale in (0.0, 1.0, 10.0):
        z = logits(scale)
        found = rank_of_logits(z, tau, multiple)
        np.testing.assert_array_equal(found, rank_of(soft_mask(z), tau, multiple))
    sure = jnp.where(jnp.arange(WIDTH) == 7, 0.0, -1e9)  # all of it on the eighth
    assert rank_of_logits(sure, tau, multiple) == min(-(-8 // multiple) * multiple, WIDTH)


def test_the_gradient_of_the_squared_rate_is_its_closed_form():
    alpha, z = 1.7, logits(1.0)
    rows = z.shape[0] * z.shape[1]

    def loss(z):
        return alpha * jnp.square(soft_mask(z).mean())

    q = np.asarray(jax.nn.softmax(z), np.float64)
    place = np.arange(WIDTH)
    cut = (q * place).sum(-1, keepdims=True)
    rate = ((cut + 1) / WIDTH).mean()
    expected = 2 * alpha * rate / rows * q * (place - cut) / WIDTH
    np.testing.assert_allclose(jax.grad(loss)(z), expected, atol=1e-8, rtol=1e-4)
