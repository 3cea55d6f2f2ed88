"""Filled caches are such as decoding leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax import recipes
from kvjax.eval.bench_decode import timed
from kvjax.eval.filled import PROMPT, filled, held
from kvjax.eval.kernel_times import kernel_times
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.thoughts import Retention, Sparsity

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 2048,
    }
)
EVERY, BUDGET = 32, 128
RECIPE = recipes.thinkv(
    BUDGET,
    segmenter=Sparsity((1,), (0.3, 0.6), every=EVERY),
    retention=Retention(schedule=(16, 8, 4)),
    page_size=16,
)


def live(cache, layer: int) -> list[np.ndarray]:
    """Positions that the first row's first KV head holds of each coded class."""
    found = []
    layer = cache.layers[layer]
    for pool, table in zip(layer.pools[1:], layer.tables[1:], strict=True):
        pos, bias = (np.asarray(x)[np.asarray(table)[0, 0]].ravel() for x in (pool.pos, pool.bias))
        found.append(np.sort(pos[bias > -np.inf]))
    return found


@pytest.mark.slow
def test_thoughts_fill_the_budget():
    context = PROMPT + 20 * EVERY
    tokens, levels = held(RECIPE, CONFIG, context)
    answer = np.concatenate([part.pos[part.pos >= PROMPT] for part in tokens])
    # 20 segments of 4 tokens fit 128, and 20 of 8 do not.
    assert len(answer) == 80 and (levels == 3).all() and len(levels) == 20
    assert set(np.bincount((answer - PROMPT) // EVERY)) == {4}
    state = filled(CONFIG, RECIPE, 2, context, 2 * EVERY)
    for there, wanted in zip(live(state.cache, 1), tokens, strict=True):
        np.testing.assert_array_equal(there, np.sort(wanted.pos))
    assert (np.asarray(state.cache.thoughts.kind)[0, :20] == np.arange(20) % 3).all()


@pytest.mark.slow
def test_decoding_goes_on_within_the_budget():
    """Borders are where they fall: kinds are told, segments close, and the budget holds."""
    model = Decoder(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    found = timed(CONFIG, [(None, model)], RECIPE, 2, PROMPT + 20 * EVERY + 5, 2, 2)
    cache = found.states[0].cache
    assert cache.length.tolist() == [PROMPT + 24 * EVERY] * 2
    assert (cache.thoughts.kind[:, 20:24] >= 0).all()
    # The last segments are still to close.
    answer = np.concatenate(live(cache, 0))
    answer = answer[answer >= PROMPT]
    assert 80 < (answer < PROMPT + 22 * EVERY).sum() <= BUDGET
    assert len(found.raw_ms) == 2 and found.upkeep_ms > 0


def test_no_gpu_has_no_kernels():
    assert jax.default_backend() == "gpu" or kernel_times(lambda: jnp.zeros(3) + 1) == []
