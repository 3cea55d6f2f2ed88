"""What ThinKV's cache takes at the length that it is made for."""

import jax
import jax.numpy as jnp
import pytest

from kvjax import recipes
from kvjax.cache import init_cache, plan
from kvjax.models.config import ModelConfig
from kvjax.thoughts import Sparsity
from tests.models import configs

LENGTH = 32_768
SHAPE = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": LENGTH,
}


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_long_answer_takes_less_than_a_fiftieth(page_size):
    """Every buffer counted, both pools and the prompt's among them; allocated, not computed."""
    config = ModelConfig.from_hf(configs.small("qwen3", **SHAPE))
    recipe = recipes.thinkv(
        budget=1024, segmenter=Sparsity((3, 9, 20, 30), (0.3, 0.6)), page_size=page_size
    )
    planned = plan(
        config,
        recipe,
        batch_size=1,
        prompt_tokens=16,
        max_new_tokens=LENGTH - 16,
        dtype=jnp.bfloat16,
        parameter_bytes=0,
    )
    cache = jax.block_until_ready(init_cache(planned.geometry))
    full = 36 * 8 * 128 * 2 * 2 * LENGTH
    assert cache.nbytes() == planned.geometry.nbytes
    assert cache.nbytes() <= 0.02 * full
    names = [codec.name for codec in cache.layers[0].codecs]
    assert names == ["bf16", "int8", "int4", "int2"]
    room = [
        table.shape[2] * pool.page_size
        for pool, table in zip(cache.layers[0].pools, cache.layers[0].tables, strict=True)
    ]
    # Any kind may be all there is: the budget, the growing segment, and a tick's tokens.
    assert room[0] == 32 and min(room[2:]) >= 1024 + 128 + 16
