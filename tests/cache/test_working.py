"""The estimate of what reading a prompt takes, against XLA's own plan of the program."""

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from flax import nnx

from kvjax import recipes
from kvjax.cache import init_cache, plan
from kvjax.cache.working import prefill_row_bytes
from kvjax.compress.policy import policies
from kvjax.decoding import prefill
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from tests.models import configs

FACTOR = 1.5
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
WIDE = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 8192,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


@pytest.fixture
def shapes_for_arrays():
    """Annotations say arrays, and here only their shapes go in."""
    checked = not jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", not checked)


@pytest.mark.usefixtures("shapes_for_arrays")
@pytest.mark.parametrize(
    ("shape", "recipe", "rows", "tokens", "dtype"),
    [
        (SMOLLM2, recipes.full(), 8, 2048, "float32"),
        (SMOLLM2, recipes.h2o(budget=512, codec="int4"), 2, 2000, "float32"),
        (WIDE, recipes.uniform("int4"), 4, 500, "bfloat16"),
    ],
    ids=["scores", "mass", "feed-forward"],
)
def test_the_estimate_is_near_what_xla_plans(shape, recipe, rows, tokens, dtype):
    config = ModelConfig.from_hf(configs.small("llama", max_position_embeddings=4096, **shape))
    planned = plan(
        config,
        recipe,
        batch_size=rows,
        prompt_tokens=tokens,
        max_new_tokens=64,
        dtype=dtype,
        parameter_bytes=0,
    )
    xla = temporaries(config, planned.geometry, recipe, 1 << (tokens - 1).bit_length())
    assert xla / FACTOR < planned.prefill_bytes < xla * FACTOR


def temporaries(config, geometry, recipe, tokens: int) -> int:
    """Bytes that the program of the first layer takes beside what goes in and out."""
    model = nnx.eval_shape(lambda: Decoder(config, dtype=geometry.dtype, rngs=nnx.Rngs(0)))
    cache = jax.eval_shape(lambda: init_cache(geometry))

    def integers(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.int32)

    x, angles, rows = jax.eval_shape(
        lambda *arrays: prefill.begin(*arrays, config=config, recipe=recipe),
        model.embed,
        cache.length,
        cache.stored,
        integers(geometry.rows, tokens),
        integers(geometry.rows),
        integers(),
    )
    lowered = prefill._read.lower(
        model.layers[0],
        cache.layers[0],
        x,
        angles,
        rows,
        cache.crowded,
        integers(),
        config=config,
        recipe=recipe,
        policy=policies(recipe, config)[0],
        window=None,
        settles=True,
        selects=recipe.selector is not None,
    )
    return lowered.compile().memory_analysis().temp_size_in_bytes


def test_where_blocks_follow_one_another_one_counts(monkeypatch):
    """On a GPU four blocks take as much as the last of them."""
    config = ModelConfig.from_hf(configs.small("llama", max_position_embeddings=4096, **SMOLLM2))
    layers = plan(
        config,
        recipes.full(),
        batch_size=1,
        prompt_tokens=2048,
        max_new_tokens=1,
        dtype="float32",
        parameter_bytes=0,
    ).geometry.layers
    taken = {}
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        taken[backend] = prefill_row_bytes(config, layers, 2048, "float32")
    block = 2 * 4 * config.num_heads * 512 * 2048
    assert taken["cpu"] - taken["gpu"] == block * (1 + 2 + 3 + 4) // 4 - block
