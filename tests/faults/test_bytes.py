"""What is allocated is what was asked for, and takes less memory at its peak too."""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from kvjax import recipes
from kvjax.cache import init_cache, plan
from kvjax.codecs import kv_codec
from kvjax.models.config import ModelConfig
from tests.models import configs

ROOT = pathlib.Path(__file__).parents[2]


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


@pytest.mark.parametrize("name", recipes.METHODS)
def test_a_method_allocates_what_it_plans(name):
    options = {"codec": "int4"} if recipes.METHODS[name]().selector else {}
    made = planned(recipes.METHODS[name](**options), tokens=300)
    cache = init_cache(made.geometry)
    assert cache.nbytes() == made.geometry.nbytes == sum(cache.usage().values())
    pools = sum(leaf.nbytes for layer in cache.layers for leaf in jax.tree.leaves(layer.pools))
    assert pools == made.geometry.pool_bytes + made.geometry.constant_bytes
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


PROGRAM = """
import dataclasses, json, re, sys
from flax import nnx
import kvjax
from kvjax.loading import GenerationDefaults, LanguageModel
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
import jax.numpy as jnp

method, options, fields = json.loads(sys.argv[1])
config = ModelConfig.from_hf(fields)
lm = LanguageModel(
    config=config,
    model=Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(0)),
    tokenizer=None,
    dtype=jnp.dtype("float32"),
    defaults=GenerationDefaults(),
    source="random",
    revision=None,
    fingerprint="",
)
prompt = [7 * i % 60 for i in range(4000)]
[result] = kvjax.generate(
    lm,
    [prompt],
    recipe=kvjax.recipes.METHODS[method](**options),
    max_new_tokens=40,
    batch_size=1,
    stop_ids=(),
    repetition_stop=False,
)
status = open("/proc/self/status").read()
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024
print(json.dumps([peak, result.report["kv"]["bytes"]["pool_allocated"]]))
"""


def peak(method: str, **options) -> tuple[int, int]:
    """Peak memory of a process that reads a long prompt and decodes, and bytes of its cache."""
    fields = configs.small(
        "qwen3",
        head_dim=64,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_hidden_layers=12,
        max_position_embeddings=8192,
    )
    command = [sys.executable, "-c", PROGRAM, json.dumps([method, options, fields])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [("uniform", {"codec": "int4"}), ("streaming", {"codec": "int4", "budget": 512})],
)
def test_the_peak_falls_with_the_cache(method, options):
    """Not just what is held in the end: reading the prompt must not undo what its codes save."""
    full_peak, full_cache = peak("full")
    own_peak, own_cache = peak(method, **options)
    saved = full_cache - own_cache
    assert saved > 100e6
    assert full_peak - own_peak > 0.5 * saved
