"""Shapes, the layers' cache contract, and what the compiled decode step does with the weights."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.models.attention import add_sinks, causal_mask, masked_attention
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.models.forward import _forward
from kvjax.models.layers import linear, rms_norm
from tests.models import configs, goldens
from tests.models.modules import randomised

FAMILIES = ["llama", "qwen2", "qwen3", "gpt_oss"]


@functools.cache
def make(family: str, dtype="float32", **changes) -> Decoder:
    """A decoder whose every parameter is random."""
    config = ModelConfig.from_hf(configs.small(family, num_hidden_layers=2, **changes))
    return randomised(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)), 0.3)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_have_the_documented_layout(family):
    biases = {"attention_bias": True} if family in ("llama", "qwen3") else {}
    mlp_bias = {"mlp_bias": True} if family == "llama" else {}
    config = ModelConfig.from_hf(configs.small(family, **biases, **mlp_bias))
    abstract = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    _, state = nnx.split(abstract)
    shapes = {
        ".".join(map(str, path)): leaf.shape
        for path, leaf in nnx.to_flat_state(state)
        if path[:2] in (("layers", 1), ("embed",), ("norm",), ("lm_head",))
    }
    heads, kv, group, dim = config.num_heads, config.num_kv_heads, config.group, config.head_dim
    expected = {
        "embed": (64, 32),
        "norm": (32,),
        "lm_head": (64, 32),
        "layers.1.input_norm": (32,),
        "layers.1.post_norm": (32,),
        "layers.1.attn.qkv": (kv, group + 2, dim, 32),
        "layers.1.attn.out": (32, heads * dim),
    }
    if config.qkv_bias:
        expected["layers.1.attn.qkv_bias"] = (kv, group + 2, dim)
    if config.out_bias:
        expected["layers.1.attn.out_bias"] = (32,)
    if config.qk_norm:
        expected |= {"layers.1.attn.q_norm": (dim,), "layers.1.attn.k_norm": (dim,)}
    if config.num_experts:
        mlp = {"router": (4, 32), "router_bias": (4,), "gate_up": (4, 32, 96)}
        mlp |= {"gate_up_bias": (4, 96), "down": (4, 48, 32), "down_bias": (4, 32)}
        expected["layers.1.attn.sinks"] = (heads,)
    else:
        mlp = {"gate_up": (2, 48, 32), "down": (32, 48)}
        mlp |= {"gate_up_bias": (2, 48), "down_bias": (32,)} if config.mlp_bias else {}
    assert shapes == expected | {f"layers.1.mlp.{name}": shape for name, shape in mlp.items()}
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(state))


def test_tied_models_have_no_head():
    model = make("llama", tie_word_embeddings=True)
    assert model.lm_head is None
    hidden = jax.random.normal(jax.random.key(0), (3, 32))
    np.testing.assert_allclose(
        model.logits(hidden), hidden @ model.embed[...].T, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_with_a_cache_equals_reading_at_once(family):
    """Token by token, each layer's keys and values kept by ``attend``."""
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    model = make(family, **(windows if family.startswith("qwen") else {}))
    config = model.config
    tokens = jax.random.randint(jax.random.key(5), (2, 20), 0, config.vocab_size)
    whole = _forward(model, tokens)
    caches = tuple(
        tuple(jnp.zeros((2, 20, config.num_kv_heads, config.head_dim)) for _ in "kv")
        for _ in range(config.num_layers)
    )
    for step in range(20):
        hidden, caches = _step(model, tokens[:, step : step + 1], jnp.int32(step), caches)
        np.testing.assert_allclose(model.logits(hidden)[:, 0], whole[:, step], rtol=0, atol=2e-4)


@jax.jit
def _step(model: Decoder, token, step, caches):
    config = model.config
    positions = jnp.broadcast_to(step, token.shape)
    slots = jnp.broadcast_to(jnp.arange(caches[0][0].shape[1])[None], (token.shape[0], 20))

    def attend(index, cache, q, k, v, sinks):
        keys, values = (
            jax.lax.dynamic_update_slice(old, new, (0, step, 0, 0))
            for old, new in zip(cache, (k, v), strict=True)
        )
        mask = causal_mask(positions, slots, config.windows[index])
        out, lse = masked_attention(q, keys, values, mask, config.scale)
        return add_sinks(out, lse, sinks), (keys, values)

    return model(token, positions, attend, caches)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, "float32") for family in FAMILIES),
        *(
            pytest.param(family, "bfloat16", marks=() if family == "llama" else pytest.mark.slow)
            for family in FAMILIES
        ),
    ],
)
def test_a_row_does_not_feel_its_neighbours(family, dtype):
    model = make(family, dtype)
    tokens = jax.random.randint(jax.random.key(6), (3, 12), 0, 64)
    others = jax.random.randint(jax.random.key(7), (3, 12), 0, 64)
    moved = others.at[2].set(tokens[0])
    first = _forward(model, tokens)[0]
    np.testing.assert_array_equal(_forward(model, others.at[0].set(tokens[0]))[0], first)
    np.testing.assert_array_equal(_forward(model, moved)[2], first)
    if dtype == "float32":
        np.testing.assert_allclose(_forward(model, tokens[:1])[0], first, rtol=0, atol=1e-4)


def test_one_cache_a_layer_is_demanded():
    def attend(index, cache, q, k, v, sinks):
        return q, cache

    token = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="shorter"):
        make("llama")(token, token, attend, (None,))


def test_rms_norm_counts_in_float32():
    x = jnp.asarray([[300.0, -400.0]], jnp.bfloat16)  # squares that bfloat16 would round
    expected = np.asarray([[300.0, -400.0]]) / np.sqrt(125_000.0) * [1.0, 0.5]
    weight = jnp.asarray([1.0, 0.5], jnp.bfloat16)
    np.testing.assert_allclose(rms_norm(x, weight, 0.0).astype(jnp.float32), expected, rtol=4e-3)
    np.testing.assert_allclose(rms_norm(jnp.zeros((1, 2)), jnp.ones(2), 1e-6), 0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3])
def test_linear_contracts_the_last_axes(dtype, rows):
    rng = np.random.default_rng(0)
    x, weight, bias = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in [(rows, 1, 16), (2, 3, 16), (2, 3)]
    )
    out = jax.jit(functools.partial(linear, dtype=jnp.float32))(x, weight, bias)
    wide = [np.asarray(a, np.float64) for a in (x, weight, bias)]
    np.testing.assert_allclose(
        out, np.einsum("btk,ghk->btgh", *wide[:2]) + wide[2], rtol=1e-4, atol=1e-4
    )
    assert linear(x, weight).dtype == jnp.dtype(dtype)


@pytest.mark.parametrize(("dtype", "rows"), [("float32", 1), ("float32", 3), ("bfloat16", 1)])
def test_a_decode_step_reads_the_weights_where_they_lie(dtype, rows):
    """No copy, transpose or conversion of the size of a weight in the compiled loop (CPU)."""
    model = make("llama", dtype, hidden_size=128, intermediate_size=256, vocab_size=512)
    graph, state = nnx.split(model)
    smallest = 128 * 128  # the output projection
    text = _loop.lower(graph, state, jnp.ones((rows, 1), jnp.int32)).compile().as_text()
    assert _large(text, "copy|transpose|convert", smallest) == []
    assert _large(text, "parameter", smallest)  # the pattern does find the weights themselves


@functools.partial(jax.jit, static_argnums=0)
def _loop(graph, state, token):
    model = nnx.merge(graph, state)
    config = model.config

    def attend(index, cache, q, k, v, sinks):
        return q + jnp.repeat(k + v, config.group, axis=2), cache

    def step(carry, _):
        token, position = carry
        hidden, _ = model(token, position, attend, (None,) * config.num_layers)
        token = model.logits(hidden).argmax(-1).astype(jnp.int32)
        return (token, position + 1), token

    return jax.lax.scan(step, (token, jnp.zeros_like(token)), None, length=4)


def _large(text: str, operations: str, smallest: int) -> list[str]:
    pattern = re.compile(rf"= \w+\[([\d,]+)\]\S* ({operations})\(")
    matches = pattern.finditer(text)
    return [m[0] for m in matches if np.prod([int(n) for n in m[1].split(",")]) >= smallest]


def test_golden_folder_is_small():
    sizes = {path: path.stat().st_size for path in goldens.FOLDER.rglob("*") if path.is_file()}
    assert max(sizes.values()) < 1_000_000
    assert sum(sizes.values()) < 4_000_000
