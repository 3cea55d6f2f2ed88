"""What is allocated is what was asked for, and takes less memory at its peak too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax import recipes
from kvjax.cache import init_cache, plan
from kvjax.codecs import kv_codec
from kvjax.compress.policy import policies
from kvjax.compress.selection import Rows
from kvjax.decoding import DecodeState, decode_chunk, prefill
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from tests.kernels.conftest import unchecked
from tests.models import configs

__all__ = ["unchecked"]


def planned(recipe, tokens: int = 4096, **changes):
    config = ModelConfig.from_hf(
        configs.small("qwen3", head_dim=64, max_position_embeddings=10_000, **changes)
    )
    return plan(
        config,
        recipe,
        batch_size=2,
        prompt_tokens=tokens,
        max_new_tokens=64,
        dtype="bfloat16",
        parameter_bytes=0,
    )


@pytest.mark.parametrize("spec", ["8", "4", "2", "fp8", "k8v4", "nvfp4", "kivi2", "16"])
def test_the_pools_have_the_bits_that_were_asked_for(spec):
    """Of every layer, in bytes on the device; and all of it is what the plan says."""
    recipe = recipes.parse("uniform", codec=spec)
    made = planned(recipe)
    cache, codec = init_cache(made.geometry), kv_codec(spec)
    for layer, shape in zip(cache.layers, made.geometry.layers, strict=True):
        pool = layer.pools[1]
        slots = pool.bias.size
        assert pool.k.nbytes * 8 == slots * 64 * codec.k.bits
        assert pool.v.nbytes * 8 == slots * 64 * codec.v.bits
        payload = sum(
            getattr(pool, name).nbytes
            for name in ("k", "v", "k_scale", "v_scale", "k_zero", "v_zero")
            if getattr(pool, name) is not None
        )
        bits = codec.k.payload_bits(64) + codec.v.payload_bits(64)
        assert payload == pytest.approx(slots * 64 * bits / 8, rel=0.01)
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(pool))
        assert held == sum(made.geometry.slot_bytes(shape.classes[1]).values()) * slots
    allocated = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    pools = sum(leaf.nbytes for layer in cache.layers for leaf in jax.tree.leaves(layer.pools))
    assert (made.geometry.pool_bytes, made.geometry.nbytes) == (pools, allocated)


@pytest.mark.parametrize("name", [n for n in recipes.METHODS if n not in recipes.ADAPTED])
def test_a_method_allocates_what_it_plans(name):
    options = {"codec": "int4"} if recipes.METHODS[name]().selector else {}
    made = planned(recipes.METHODS[name](**options), tokens=300)
    cache = init_cache(made.geometry)
    assert cache.nbytes() == made.geometry.nbytes == sum(cache.usage().values())
    pools = sum(leaf.nbytes for layer in cache.layers for leaf in jax.tree.leaves(layer.pools))
    assert pools == made.geometry.pool_bytes + cache.usage()["constants"]
    for layer in cache.layers:
        for pool, codec in zip(layer.pools, layer.codecs, strict=True):
            assert (pool.k_format, pool.v_format) == (codec.k.fmt, codec.v.fmt)
            wanted = jnp.bfloat16 if codec.k.fmt == "float" else jnp.uint8
            assert pool.k.dtype == wanted


def test_bytes_grow_with_kv_heads_and_not_with_query_heads():
    """Keys and values are never repeated for the query heads of a group."""
    recipe = recipes.uniform("int4")
    one, more_queries, more_keys = (
        planned(recipe, num_attention_heads=queries, num_key_value_heads=keys).geometry
        for queries, keys in ((4, 2), (16, 2), (16, 4))
    )
    assert one.nbytes == more_queries.nbytes
    scratch = sum(
        shape.page_size * sum(one.slot_bytes(shape).values())
        for layer in one.layers
        for shape in layer.classes
    )
    assert more_keys.pool_bytes - scratch == 2 * (one.pool_bytes - scratch)


LAYERS, TOKENS, CHUNK = 8, 8000, 2048


def peak(recipe) -> int:
    """Bytes of the cache of a long row and of what the programs that work on it take beside it."""
    config = ModelConfig.from_hf(
        configs.small(
            "qwen3",
            head_dim=64,
            num_attention_heads=8,
            num_key_value_heads=8,
            num_hidden_layers=LAYERS,
            max_position_embeddings=2 * TOKENS,
        )
    )
    geometry = plan(
        config,
        recipe,
        batch_size=1,
        prompt_tokens=TOKENS,
        max_new_tokens=64,
        dtype="float32",
        parameter_bytes=0,
    ).geometry
    cache = jax.eval_shape(lambda: init_cache(geometry))
    model = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    zero, flag = np.zeros(1, np.int32), np.zeros(1, bool)
    read = prefill._read.lower(
        model.layers[0],
        cache.layers[0],
        np.zeros((1, CHUNK, config.hidden_size), np.float32),
        (np.zeros((1, CHUNK, 32), np.float32),) * 2,
        Rows(zero, zero, zero, zero, zero, flag, np.int32(0)),
        zero,
        np.int32(0),
        config=config,
        recipe=recipe,
        policy=policies(recipe, config)[0],
        window=None,
        settles=True,
        selects=True,
    )
    state = DecodeState(cache, zero, zero, flag)
    decode = decode_chunk.lower(
        model, state, None, flag, steps=recipe.tick, stop_ids=(), recipe=recipe
    )
    beside = [program.compile().memory_analysis().temp_size_in_bytes for program in (read, decode)]
    return geometry.nbytes + max(beside)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")  # lowering builds pytrees of no arrays
def test_the_peak_falls_with_the_cache():
    """Not just what is held in the end: neither reading a prompt nor decoding undoes what is
    saved, by a copy of the cache or by its codes as numbers."""
    whole = peak(recipes.full())
    for recipe in (recipes.uniform("int4"), recipes.streaming(codec="int4", budget=256)):
        assert peak(recipe) < 0.6 * whole, recipe.name
