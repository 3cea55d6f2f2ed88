"""Keys, queries and values in the basis that they are stored in."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.codecs import (
    KeyBasis,
    code_keys,
    code_queries,
    code_values,
    key_basis,
    kv_codec,
    plain_keys,
    plain_output,
)

ROWS, TOKENS, HEADS, GROUP = 2, 7, 3, 4


def problem(dim: int, dtype=jnp.float32, seed: int = 0):
    """Queries, keys and values of a layer, and its basis."""
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.standard_normal((ROWS, TOKENS, HEADS * GROUP, dim)), dtype)
    k, v = (jnp.asarray(rng.standard_normal((ROWS, HEADS, TOKENS, dim)), dtype) for _ in "kv")
    mean = jnp.asarray(rng.standard_normal((HEADS, dim)) * 5, jnp.float32)
    balance = jnp.asarray(np.exp(rng.standard_normal((HEADS, dim))), jnp.float32)
    return q, k, v, mean, balance


@pytest.mark.parametrize("with_mean", [True, False])
@pytest.mark.parametrize("with_balance", [True, False])
@pytest.mark.parametrize("name", ["int4", "bf16", "nvfp4"])
@pytest.mark.parametrize(("dim", "dtype"), [(16, jnp.float32), (12, jnp.bfloat16)])
def test_products_are_those_of_the_plain_vectors(name, with_mean, with_balance, dim, dtype):
    codec = kv_codec(name)
    q, k, v, mean, balance = problem(dim, dtype)
    basis = KeyBasis(mean if with_mean else None, balance if with_balance else None)
    coded_k, (coded_q, offset) = code_keys(codec, basis, k), code_queries(codec, basis, q)
    assert (offset is not None) == with_mean
    exact_q, exact_k = (np.asarray(x).astype(np.float64) for x in (q, k))
    for head in range(HEADS * GROUP):
        plain = np.einsum("btd,bsd->bts", exact_q[:, :, head], exact_k[:, head // GROUP])
        coded = np.einsum(
            "btd,bsd->bts",
            np.asarray(coded_q, np.float64)[:, :, head],
            np.asarray(coded_k, np.float64)[:, head // GROUP],
        )
        if with_mean:
            coded = coded + np.asarray(offset)[:, :, head, None]
        np.testing.assert_allclose(coded, plain, rtol=0, atol=2e-4)
    np.testing.assert_allclose(plain_keys(codec, basis, coded_k), exact_k, rtol=0, atol=1e-4)
    np.testing.assert_allclose(
        plain_output(codec, code_values(codec, v)), np.asarray(v, np.float32), rtol=0, atol=1e-5
    )
    outputs = (coded_k, coded_q, code_values(codec, v), plain_output(codec, v))
    assert {x.dtype for x in outputs} == {jnp.dtype(jnp.float32)}


def test_what_is_encoded_is_centred_then_balanced_then_rotated():
    _, k, v, mean, balance = problem(16)
    basis = KeyBasis(mean, balance)
    plain = kv_codec("nvfp4")
    by_hand = (k - mean[None, :, None]) / balance[None, :, None]
    np.testing.assert_allclose(code_keys(plain, basis, k), by_hand, rtol=1e-6)
    assert abs(code_keys(kv_codec("int4"), basis, k) - by_hand).max() > 0.5
    # Rotated values stay so through any sum over tokens.
    codec = kv_codec("int4")
    assert abs(code_values(codec, v) - v).max() > 0.5
    weights = jax.nn.softmax(v[..., 0], -1)
    mixed = jnp.einsum("bht,bhtd->bhd", weights, code_values(codec, v))
    expected = jnp.einsum("bht,bhtd->bhd", weights, v)
    np.testing.assert_allclose(plain_output(codec, mixed), expected, rtol=0, atol=1e-5)


def test_a_head_reads_its_own_constants():
    codec = kv_codec("int4")
    q, k, _, mean, balance = problem(16)
    basis = KeyBasis(mean.at[1].set(jnp.nan), balance.at[1].set(jnp.nan))
    coded_q, offset = code_queries(codec, basis, q)
    assert np.isnan(code_keys(codec, basis, k)).any((0, 2, 3)).tolist() == [False, True, False]
    expected = [head // GROUP == 1 for head in range(HEADS * GROUP)]
    assert np.isnan(coded_q).any((0, 1, 3)).tolist() == expected
    assert np.isnan(offset).any((0, 1)).tolist() == expected


def attention_kl(codec, basis, q, k) -> float:
    """Mean KL divergence of attention over coded keys from attention over the plain ones."""

    @jax.jit
    def coded_logits(q, k):
        coded = codec.k.decode(codec.k.encode(code_keys(codec, basis, k)))
        turned, offset = code_queries(codec, basis, q)
        logits = jnp.einsum("bthgd,bhsd->bthgs", by_group(turned), coded)
        return logits if offset is None else logits + by_group(offset[..., None])

    def by_group(x):
        return x.reshape(*x.shape[:2], k.shape[1], -1, x.shape[-1])

    scale = q.shape[-1] ** -0.5
    plain = jnp.einsum("bthgd,bhsd->bthgs", by_group(q), k)
    full, coded = (jax.nn.log_softmax(x * scale, -1) for x in (plain, coded_logits(q, k)))
    return float((jnp.exp(full) * (full - coded)).sum(-1).mean())


def biased_keys(dim: int, seed: int = 0):
    """Keys of a model with a key bias: three channels a head are all far from zero."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((1, 40, HEADS * GROUP, dim))
    k = rng.standard_normal((1, HEADS, 256, dim))
    for head in range(HEADS):
        k[:, head, :, rng.permutation(dim)[:3]] += np.array([100, -100, 100])[:, None, None]
    return jnp.asarray(q, jnp.float32), jnp.asarray(k, jnp.float32)


@pytest.mark.parametrize(
    ("dim", "balance"),
    [
        (64, True),
        (80, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((64, False), (80, True), (128, True), (128, False))
        ),
    ],
)
def test_a_key_bias_needs_the_mean(dim, balance):
    codec = kv_codec("int4")
    q, k = biased_keys(dim)
    seen = k[0, :, :100].swapaxes(0, 1)  # what calibration read is not all that follows
    basis = key_basis(seen, center=True, balance=balance)
    assert attention_kl(codec, basis, q, k) < 0.02
    assert attention_kl(codec, dataclasses.replace(basis, mean=None), q, k) > 0.3


def test_a_wide_channel_needs_the_balance():
    codec = kv_codec("int4")
    q, k = biased_keys(64)
    k = k.at[..., 5].multiply(60.0)
    seen = k[0].swapaxes(0, 1)
    kl = {
        balance: attention_kl(codec, key_basis(seen, center=True, balance=balance), q, k)
        for balance in (True, False)
    }
    assert kl[True] < kl[False] / 3
