"""Sizing a cache before there is one."""

import dataclasses
import re

import jax.numpy as jnp
import pytest

from kvjax import recipes
from kvjax.cache import Plan, plan
from kvjax.cache.plan import PREFILL_CHUNK, bucket, padded_prompt
from kvjax.errors import CapacityError, UsageError
from kvjax.models.config import ModelConfig
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
    memory = exact.parameter_bytes + exact.geometry.nbytes + spare
    largest = sized(memory_bytes=memory).largest_batch()
    assert largest >= rows and (largest == rows or spare == 10**6)
    fitting = sized(batch_size=largest, memory_bytes=memory)
    assert fitting.parameter_bytes + fitting.geometry.nbytes <= memory
    fitting.check()
    more = sized(batch_size=largest + 1, memory_bytes=memory)
    assert more.parameter_bytes + more.geometry.nbytes > memory
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
    assert f"there are {memory / 2**20:.2f} MiB" in text


@pytest.mark.parametrize("short_of", [1, 10**6])
def test_where_not_even_one_row_fits(short_of):
    one = sized(batch_size=1)
    memory = one.parameter_bytes + one.geometry.nbytes - short_of
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
    assert lines["largest batch"] == str(planned.largest_batch())
    assert re.fullmatch(r"16\.00 GiB", lines["memory"])
    assert "memory" not in dict(sized().rows())


def test_the_yardstick_is_a_bare_bfloat16_cache():
    assert sized().geometry.full_token_bytes == 4 * 2 * (16 + 16) * 2


def test_recipes():
    assert recipes.full() == recipes.Recipe("full", 64, codec=None)
    assert hash(recipes.full(16)) == hash(recipes.full(16)) != hash(recipes.full(32))
    for size in (0, -64, 3, 48):
        with pytest.raises(UsageError, match=f"power of two, got {size}"):
            recipes.full(size)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipes.full().page_size = 3
