"""Sizing a cache before there is one."""

import dataclasses
import re

import jax.numpy as jnp
import pytest

from kvjax import recipes
from kvjax.cache import Plan, init_cache, plan
from kvjax.cache.plan import PREFILL_CHUNK, bucket, padded_prompt
from kvjax.compress.policy import policies
from kvjax.compress.settle import leaving
from kvjax.errors import CapacityError, UsageError
from kvjax.models.config import ModelConfig
from kvjax.report.units import size
from kvjax.thoughts import Given
from tests.models import configs

CONFIG = ModelConfig.from_hf(configs.small("qwen3", max_position_embeddings=10_000))


def sized(**changes) -> Plan:
    request = {
        "batch_size": 3,
        "prompt_tokens": 100,
        "max_new_tokens": 50,
        "dtype": "float32",
        "parameter_bytes": 10**6,
    }
    return plan(CONFIG, recipes.full(), **(request | changes))


def test_buckets():
    for tokens in range(1, 5000):
        size = bucket(tokens)
        assert size & (size - 1) == 0
        assert size == 16 if tokens <= 16 else tokens <= size < 2 * tokens


def test_a_padded_prompt_is_its_chunks_with_the_last_in_its_bucket():
    for tokens in [*range(1, 300), *range(2040, 2100), *range(4000, 4300), 10**6]:
        pieces = [min(PREFILL_CHUNK, tokens - start) for start in range(0, tokens, PREFILL_CHUNK)]
        assert sum(pieces) == tokens
        assert all(bucket(piece) <= PREFILL_CHUNK for piece in pieces)
        assert padded_prompt(tokens) == sum(map(bucket, pieces))


def test_prompts_of_one_bucket_have_one_plan():
    for low, high in ((1, 16), (17, 32), (65, 128), (1025, 2048), (2049, 2064), (4096 + 33, 4160)):
        assert sized(prompt_tokens=low) == sized(prompt_tokens=high)
        assert sized(prompt_tokens=high) != sized(prompt_tokens=high + 1)


@pytest.mark.parametrize("prompt", [1, 15, 63, 64, 65, 900, 2048, 2049, 9_000, 9_999])
@pytest.mark.parametrize("new", [1, 14, 15, 16, 64, 5000])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_the_pages_hold_what_a_row_can_get_to_and_no_page_more(prompt, new, page):
    planned = plan(
        CONFIG,
        recipes.full(page),
        batch_size=2,
        prompt_tokens=prompt,
        max_new_tokens=new,
        dtype="bfloat16",
        parameter_bytes=0,
    )
    longest = min(prompt + new, CONFIG.context_length)
    [shape] = set(planned.geometry.layers).pop().classes
    assert longest <= planned.tokens <= CONFIG.context_length
    assert planned.tokens <= shape.capacity < planned.tokens + page
    assert planned.geometry.pages(shape) == 1 + 2 * CONFIG.num_kv_heads * shape.pages_per_head


def test_the_geometry_is_the_models():
    shape = sized(dtype="bfloat16").geometry
    assert (len(shape.layers), shape.num_kv_heads, shape.head_dim) == (4, 2, 16)
    assert (shape.rows, shape.dtype) == (3, jnp.bfloat16)
    for layer in shape.layers:
        [part] = layer.classes
        assert (part.page_size, part.pages_per_head) == (64, -(-(128 + 50) // 64))


@pytest.mark.parametrize("spare", [0, 1, 12_345, 10**6])
@pytest.mark.parametrize("rows", [1, 2, 7, 100])
def test_the_largest_batch_fits_and_one_row_more_does_not(rows, spare):
    exact = sized(batch_size=rows)
    memory = exact.nbytes + spare
    largest = sized(memory_bytes=memory).largest_batch()
    assert largest >= rows and (largest == rows or spare == 10**6)
    fitting = sized(batch_size=largest, memory_bytes=memory)
    assert fitting.nbytes <= memory
    fitting.check()
    more = sized(batch_size=largest + 1, memory_bytes=memory)
    assert more.nbytes > memory
    with pytest.raises(CapacityError, match=f"pass --batch-size {largest}$"):
        more.check()


def test_a_refusal_has_the_numbers():
    memory = 10**6 + 300_000
    with pytest.raises(CapacityError) as error:
        sized(batch_size=64, memory_bytes=memory).check()
    assert error.value.exit_code == 4
    need = sized(batch_size=64).geometry.nbytes
    text = str(error.value)
    assert text.startswith("64 rows of 178 tokens need ")
    assert f"{need / 2**20:.2f} MiB of cache beside {10**6 / 2**10:.2f} KiB of weights" in text
    taken = size(sized(batch_size=64).prefill_bytes)
    assert f"of weights and about {taken} while prompts are read" in text
    assert f"there are {memory / 2**20:.2f} MiB" in text


@pytest.mark.parametrize("short_of", [1, 10**6])
def test_where_not_even_one_row_fits(short_of):
    one = sized(batch_size=1)
    memory = one.nbytes - short_of
    planned = sized(batch_size=1, memory_bytes=memory)
    assert planned.largest_batch() == 0
    with pytest.raises(CapacityError, match="smaller --max-new-tokens or model"):
        planned.check()


def test_memory_that_is_not_known_refuses_nothing():
    planned = sized(batch_size=10**9)
    assert planned.largest_batch() is None
    planned.check()


def test_the_lines_of_a_plan():
    planned = sized(batch_size=2, memory_bytes=2**34)
    lines = dict(planned.rows())
    shape = planned.geometry
    assert lines["method"] == "full"
    assert (lines["rows"], lines["tokens a row"]) == ("2", "178")
    assert lines["4 layers, bf16"] == (
        f"3 pages a KV head of 64 slots of {2 * 16 * 4 + 8} bytes, "
        f"{1 + 2 * 2 * 3} pages in the pool"
    )
    # float32 and its metadata against two bytes a number.
    held = shape.nbytes / 2 / 178
    ratio = held / shape.full_token_bytes
    assert lines["bytes a token"] == f"{held:,.0f} ({ratio:.3f} of a bare bf16 cache)"
    assert planned.nbytes == 10**6 + shape.nbytes + 2 * planned.prefill_row_bytes
    assert lines["reading prompts"] == f"about {size(planned.prefill_bytes)}"
    assert lines["largest batch"] == str(planned.largest_batch())
    assert re.fullmatch(r"16\.00 GiB", lines["memory"])
    assert "memory" not in dict(sized().rows())


def test_the_yardstick_is_a_bare_bfloat16_cache():
    assert sized().geometry.full_token_bytes == 4 * 2 * (16 + 16) * 2


def test_recipes():
    assert recipes.full() == recipes.Recipe("full", 64, codec=None)
    assert hash(recipes.full(16)) == hash(recipes.full(16)) != hash(recipes.full(32))
    for slots in (0, -64, 3, 48):
        with pytest.raises(UsageError, match=f"power of two, got {slots}"):
            recipes.full(slots)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipes.full().page_size = 3


def sized_for(recipe, config, batch_size: int = 1) -> Plan:
    return plan(
        config,
        recipe,
        batch_size=batch_size,
        prompt_tokens=200,
        max_new_tokens=50,
        dtype="float32",
        parameter_bytes=0,
    )


RECIPES = [
    recipes.full(16),
    recipes.uniform("int4"),
    recipes.uniform("int8", layer_codecs=((1, "kivi4-g16"),)),
    recipes.uniform("kivi2-g8", layer_codecs=((0, "nvfp4"), (-1, "bf16")), window=5, tick=3),
    recipes.kivi("kivi4-g8", window=12),
    recipes.streaming(budget=64, positions="contiguous"),
    recipes.h2o(budget=0.3, tick=1, every=1, window=1),
    recipes.rkv(budget=256, skip_layers=(0,), protect_prompt=True),
    recipes.thinkv(segmenter=Given(every=64), window=12, tick=32, paper=True),
]
WINDOWED = ModelConfig.from_hf(
    configs.small("gpt_oss", head_dim=16, max_position_embeddings=10_000)
)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.name} {recipe.codec}")
@pytest.mark.parametrize("config", [CONFIG, WINDOWED], ids=["full", "windows"])
def test_no_pool_can_run_out_of_pages(config, recipe):
    """There is one for every place of its tables: all heads of all rows can be full at once."""
    planned = sized_for(recipe, config, batch_size=3)
    for layer in init_cache(planned.geometry).layers:
        for pool, table, free in zip(layer.pools, layer.tables, layer.free, strict=True):
            assert int(free.count) == table.size == len(free.pages) == len(pool.bias) - 1


@pytest.mark.parametrize("recipe", RECIPES[1:], ids=lambda recipe: f"{recipe.name} {recipe.codec}")
def test_the_recent_class_holds_all_that_has_not_left_it(recipe):
    """A token is written at its position modulo the capacity, so one too many overwrites another.

    Tokens leave in groups of the largest codec of any layer, whatever the layer's own.
    """
    of_layer = policies(recipe, CONFIG)
    layers = sized_for(recipe, CONFIG).geometry.layers
    capacity = {layer.classes[0].capacity for layer in layers}
    most = 0
    for prompt in range(1, 80):
        length = first = jnp.full(1, prompt, jnp.int32)
        stored = jnp.zeros(1, jnp.int32)
        for _ in range(12):
            stored = leaving(recipe, of_layer, stored, length, first)
            length = length + recipe.tick
            most = max(most, int((length - stored)[0]))
    assert most <= min(capacity)
    assert max(capacity) < most + 16  # pages of recent tokens have 16 slots
