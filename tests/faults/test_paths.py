"""Every way to read a coded cache gives what dense float32 attention over its numbers gives: keys
and values differ, and so do their scales, which no path may forget or swap."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import recipes
from kvjax.codecs import KeyBasis
from kvjax.compress.policy import policies
from kvjax.decoding import DecodeState, chunk, maintain, prefill, prefill_chunk
from kvjax.decoding.forced import force_chunk
from pallas_kernels import read
from pallas_kernels.paged_attention import xla
from tests.decoding import small
from tests.faults import cached

SMALL = {"page_size": 16, "window": 4, "tick": 4}
CASES = {
    "llama k8v4": ("llama", recipes.uniform("k8v4", **SMALL)),
    "llama fp8": ("llama", recipes.uniform("fp8", **SMALL)),
    "llama kivi4": ("llama", recipes.kivi("kivi4-g8", page_size=16)),
    "qwen2 k4v8": ("qwen2", recipes.uniform("k4v8", **SMALL)),
    "gpt_oss int8": ("gpt_oss", recipes.uniform("int8", **SMALL)),
    "gpt_oss_plain kivi4": ("gpt_oss_plain", recipes.uniform("kivi4-g8", **SMALL)),
    "gpt_oss k8v4": ("gpt_oss", recipes.uniform("k8v4", **SMALL)),
    "gpt_oss h2o int4": (
        "gpt_oss",
        recipes.h2o(codec="int4", budget=32, every=4, recent=8, **SMALL),
    ),
}
QUICK = ("qwen2 k4v8",)
PIECES = (40, 11)


def wide(model: str):
    """A golden model whose values are larger than its keys, so that their scales differ."""

    def grow(decoder):
        for layer in decoder.layers:
            # Of a KV head's rows, queries come first, then its key, then its value.
            fused = layer.attn.qkv[...]
            layer.attn.qkv = type(layer.attn.qkv)(fused.at[:, -1].multiply(8.0))

    return small.changed(small.lm(model), grow)


def bases(config):
    """Constants that no neutral ones could stand for."""
    rng = np.random.default_rng(3)
    shape = (config.num_kv_heads, config.head_dim)
    return [
        KeyBasis(
            jnp.asarray(rng.normal(size=shape), jnp.float32),
            jnp.asarray(rng.uniform(0.3, 3, size=shape), jnp.float32),
        )
        for _ in range(config.num_layers)
    ]


def errors(model: str, recipe) -> dict[str, float]:
    """Largest error of the logits, relative to the largest logit, by the path that made them."""
    lm = wide(model)
    tokens = np.random.default_rng(1).integers(0, 95, 200)
    cache = cached.empty(lm, recipe, sum(PIECES) + 32, bases(lm.config))
    zeros, at, found = jnp.zeros((1, lm.config.vocab_size)), 0, {}

    def compare(path: str, logits, expected):
        error = np.abs(logits - expected).max() / np.abs(expected).max()
        found[path] = max(found.get(path, 0.0), float(error))

    def read_piece(cache, count: int, path: str):
        ids = np.full((1, 64), 7, np.int32)
        ids[0, :count] = tokens[at : at + count]
        expected = cached.expected(lm, cache, ids[0, :count])[-1]
        cache, logits = prefill_chunk(
            lm.model, cache, zeros + 0, ids, np.int32([count]), recipe=recipe
        )
        compare(path, logits[0], expected)
        return cache

    for i, count in enumerate(PIECES):
        cache = read_piece(cache, count, "prefill in pieces" if i else "prefill")
        at += count
    for pool in (pool for layer in cache.layers for pool in layer.pools[1:]):
        k, v = (np.float32(s[np.float32(s) > 0]).mean() for s in (pool.k_scale, pool.v_scale))
        assert abs(np.log(k / v)) > 0.5, "scales too much alike to be told apart"
    left, token = jnp.full(1, 200, jnp.int32), jnp.zeros(1, jnp.int32)
    state = DecodeState(cache, token, left, jnp.ones(1, bool))
    for step in range(2 * recipe.tick):
        if step == recipe.tick:
            state = maintain(
                state,
                np.ones(1, bool),
                config=lm.config,
                recipe=recipe,
                done=recipe.every or step,
            )
        expected = cached.expected(lm, state.cache, tokens[at : at + 1])[0]
        given = jnp.asarray(tokens[None, at : at + 1].T, jnp.int32)
        state, logits, _, _ = force_chunk(lm.model, state, given, width=None, recipe=recipe)
        compare("decode", logits[0, 0], expected)
        at += 1
    # Another turn of the conversation.
    state = maintain(state, np.ones(1, bool), config=lm.config, recipe=recipe, done=2 * recipe.tick)
    read_piece(state.cache, 11, "resume")
    return found


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES]
)
def test_prefill_pieces_decode_and_resume_equal_the_dense_reference(case):
    found = errors(*CASES[case])
    assert set(found) == {"prefill", "prefill in pieces", "decode", "resume"}
    assert max(found.values()) < 2e-4, found


@pytest.fixture
def mutable():
    """Programs traced with a fault must not be met again, nor ones without it before."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.slow
def test_a_path_that_takes_the_wrong_scale_is_seen(mutable, monkeypatch):
    def swapped(pages, table, dtype):
        scale = None if pages.k_scale is None else pages.k_scale.swapaxes(-1, -2)
        parts = (pages.v, scale, pages.v_zero)
        return read._numbers(parts, pages.v_format, -2, table, dtype)

    monkeypatch.setattr(read, "coded_values", swapped)
    monkeypatch.setattr(xla, "coded_values", swapped)
    found = errors(*CASES["llama k8v4"])
    assert found["prefill"] < 2e-4  # which meets no page
    assert min(found[path] for path in ("prefill in pieces", "decode", "resume")) > 1e-2, found


@pytest.mark.slow
def test_a_path_without_the_sinks_is_seen(mutable, monkeypatch):
    attention = chunk.paged_attention
    monkeypatch.setattr(
        chunk, "paged_attention", lambda *a, sinks, **rest: attention(*a, sinks=None, **rest)
    )
    monkeypatch.setattr(prefill, "add_sinks", lambda out, lse, sinks: out)
    found = errors(*CASES["gpt_oss int8"])
    assert min(found.values()) > 1e-3, found


def test_a_model_with_sinks_keeps_its_keys_in_8_bits_or_more_unless_told_otherwise():
    """By default nothing is coded; with a coded method its first layer has 8 bits, and the key bias
    of all of them has its mean and balance."""
    config = small.lm("gpt_oss").config
    for name, make in recipes.METHODS.items():
        if name in recipes.ADAPTED:
            continue
        recipe = make()
        if recipe.name in ("uniform", "kivi", "thinkv"):  # whose very point is few bits
            continue
        codecs = [codec for policy in policies(recipe, config) for codec in policy.classes]
        assert all(codec.k.bits >= 8 for codec in codecs)
    first, *others = policies(recipes.uniform("int4"), config)
    assert [codec.k.bits for codec in first.classes] == [8]
    assert all(codec.center and codec.balance for policy in others for codec in policy.classes)
    plain = dataclasses.replace(config, qkv_bias=False)
    assert policies(recipes.uniform("int4"), plain)[0].classes[0].k.bits == 4
