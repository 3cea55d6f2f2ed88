"""The mixture of experts against a loop over tokens, and the isolation of its rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.models.config import ModelConfig
from kvjax.models.experts import Experts
from tests.models import configs
from tests.models.modules import randomised

CONFIG = ModelConfig.from_hf(configs.small("gpt_oss", swiglu_limit=0.7, num_local_experts=5))


def make(dtype) -> Experts:
    """Experts whose every parameter matters."""
    return randomised(lambda: Experts(CONFIG, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)), 0.4)


def reference(experts: Experts, token: np.ndarray) -> np.ndarray:
    """One token through its experts, one at a time, in float64."""
    p = {
        name: np.asarray(getattr(experts, name)[...], np.float64)
        for name in ("router", "router_bias", "gate_up", "gate_up_bias", "down", "down_bias")
    }
    logits = p["router"] @ token + p["router_bias"]
    chosen = np.argsort(-logits)[: CONFIG.experts_per_token]
    weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
    out = np.zeros_like(token)
    for expert, weight in zip(chosen, weights, strict=True):
        both = token @ p["gate_up"][expert] + p["gate_up_bias"][expert]
        gate = np.minimum(both[0::2], CONFIG.swiglu_limit)
        up = np.clip(both[1::2], -CONFIG.swiglu_limit, CONFIG.swiglu_limit)
        inner = (up + 1) * gate / (1 + np.exp(-CONFIG.swiglu_alpha * gate))
        out += weight * (inner @ p["down"][expert] + p["down_bias"][expert])
    return out


def test_equals_a_loop_over_tokens_and_experts():
    experts = make("float32")
    x = jax.random.normal(jax.random.key(2), (3, 7, CONFIG.hidden_size))
    expected = [[reference(experts, token) for token in row] for row in np.asarray(x, np.float64)]
    np.testing.assert_allclose(jax.jit(experts)(x), expected, atol=2e-5)


def test_the_clip_is_felt():
    x = jax.random.normal(jax.random.key(2), (1, 16, CONFIG.hidden_size))
    loose = make("float32")
    loose.config = ModelConfig.from_hf(configs.small("gpt_oss", num_local_experts=5))
    assert float(jnp.abs(jax.jit(make("float32"))(x) - jax.jit(loose)(x)).max()) > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_does_not_feel_its_neighbours(dtype):
    """Bit for bit, wherever it stands in the batch and whichever experts the others choose."""
    experts = jax.jit(make(dtype))
    token = jax.random.normal(jax.random.key(3), (CONFIG.hidden_size,), dtype)
    first = experts(jnp.zeros((4, 3, CONFIG.hidden_size), dtype).at[0, 0].set(token))[0, 0]
    for seed, place in enumerate([(0, 0), (1, 2), (3, 0), (3, 2)]):
        others = 3 * jax.random.normal(jax.random.key(seed), (4, 3, CONFIG.hidden_size), dtype)
        out = experts(others.at[place].set(token))[place]
        np.testing.assert_array_equal(out.astype(jnp.float32), first.astype(jnp.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_poisoned_neighbour_stays_alone(dtype):
    experts = jax.jit(make(dtype))
    x = jax.random.normal(jax.random.key(4), (1, 6, CONFIG.hidden_size), dtype)
    out = experts(x.at[0, 2].set(jnp.nan))
    keep = np.asarray([0, 1, 3, 4, 5])
    np.testing.assert_array_equal(
        out[:, keep].astype(jnp.float32), experts(x)[:, keep].astype(jnp.float32)
    )
