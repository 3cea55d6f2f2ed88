"""Answers on several devices are those on one."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax import recipes
from kvjax.compare import compare
from kvjax.loading import read_config
from kvjax.sharding import check_mesh, device_mesh, groups
from tests.decoding import small
from tests.decoding.test_inflight import RECIPES
from tests.models import goldens
from tests.recipes.test_budget import made

slow = pytest.mark.slow
MESHES = {"tp2": (2, 1), "tp4": (4, 1), "dp2": (1, 2), "dp2 tp2": (2, 2)}
QUICK = ("dp2 tp2",)


@functools.cache
def lm(tp: int, dp: int = 1, name: str = "llama") -> kvjax.LanguageModel:
    """A golden model on several devices, with room for long rows."""
    model = kvjax.load(goldens.FOLDER / name, mesh=device_mesh(tp, dp))
    config = dataclasses.replace(model.config, context_length=1 << 14)
    return dataclasses.replace(model, config=config)


@pytest.mark.parametrize(
    "size", [pytest.param(MESHES[n], id=n, marks=() if n in QUICK else slow) for n in MESHES]
)
def test_full(size):
    """As many devices as KV heads, more of them, and rows of their own."""
    assert tuple(small.tokens(small.prompts(), lm(*size))) == small.usual()


@slow
def test_samples():
    """Every device draws the same, and samples share their prompt's pages on each."""
    how = small.SAMPLED | {"samples": 3}
    expected = small.tokens(small.prompts(), **how)
    for size in ((2, 1), (2, 2)):
        assert small.tokens(small.prompts(), lm(*size), **how) == expected


def can_share(name: str, tp: int) -> bool:
    config = read_config(goldens.FOLDER / name)
    try:
        check_mesh(config, tp)
    except kvjax.UsageError:
        return False
    return True


@slow
@pytest.mark.parametrize(
    ("name", "tp"), [(n, tp) for n in goldens.NAMES for tp in (2, 3, 4) if can_share(n, tp)]
)
def test_every_model(name, tp):
    """Experts, sinks, sliding windows, biases, norms and tied embeddings; and copies of heads."""
    for recipe in (recipes.full(small.PAGE), recipes.uniform("int8", page_size=small.PAGE)):
        expected = small.tokens(small.prompts(), small.lm(name), recipe=recipe)
        assert small.tokens(small.prompts(), lm(tp, 1, name), recipe=recipe) == expected


EVICTING = RECIPES | {
    # Where scores are equal but for rounding, the order of a sum decides which token stays; here
    # no other number of bits makes more of it.
    "snapkv_decode": made("snapkv_decode", budget=40, codec="bf16", every=32),
    "heads": made("snapkv_decode", budget=40, every=32, head_shares=((1, 3), (2, 1), (1, 1))),
}


@slow
@pytest.mark.parametrize("name", EVICTING)
def test_every_recipe(name, text_lm):
    """Each device works on its own heads, and they agree on what all of them decide."""
    recipe = EVICTING[name]

    def tokens(model):
        if recipe.needs_text:
            model = dataclasses.replace(model, tokenizer=text_lm.tokenizer)
        return small.tokens(
            small.prompts([40, 63, 33, 57, 48, 50], seed=5),
            model,
            recipe=recipe,
            max_new_tokens=112 if recipe.segmenter else 64,
            batch_size=3,
            repetition_stop=False,
        )

    assert tokens(lm(2)) == tokens(small.lm())


def test_each_device_gets_its_part():
    model = lm(2, 2)
    heads = model.model.layers[0].attn.qkv[...]
    assert {shard.data.shape[0] for shard in heads.addressable_shards} == {1}
    assert len({shard.device for shard in heads.addressable_shards}) == 4
    assert model.nbytes < 0.6 * small.lm().nbytes
    whole = small.lm().model.layers[0].attn.qkv[...]
    for group in groups(model):
        part = group.model.layers[0].attn.qkv[...]
        np.testing.assert_array_equal(part, whole)
        kept = {
            shard.device: shard.data.unsafe_buffer_pointer() for shard in part.addressable_shards
        }
        for shard in heads.addressable_shards:
            if shard.device in kept:
                assert kept[shard.device] == shard.data.unsafe_buffer_pointer()


def test_the_record_says_on_how_many_devices():
    result, alone = small.decode(small.prompts(), lm(2, 2))[0], small.decode(small.prompts())[0]
    assert result.report["run"]["tp"] == 2
    for name in ("live_tokens", "ratio", "bits"):
        assert result.report["kv"][name] == alone.report["kv"][name]
    assert result.report["kv"]["bytes"]["full_bf16"] == alone.report["kv"]["bytes"]["full_bf16"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"tp": 3},
            "tp 3 does not divide the model's 2 KV heads, nor do they divide it: take 1 or",
        ),
        ({"tp": 5}, "tp 5 times dp 1 is 5 devices, and this process has 4: take fewer"),
        ({"dp": 0}, "dp must be a whole number above 0, got 0"),
        ({"tp": True}, "tp must be a whole number above 0, got True"),
    ],
)
def test_devices_that_cannot_share(arguments, message):
    with pytest.raises(kvjax.UsageError) as error:
        kvjax.load(goldens.FOLDER / "llama", mesh=device_mesh(**arguments))
    assert message in str(error.value)


def test_copies_of_a_head_would_part():
    with pytest.raises(kvjax.UsageError, match="tp 4 is more than the model's 2 KV heads, and wit"):
        small.tokens(small.prompts(), lm(4), recipe=made("rkv", budget=40))


def test_no_mesh_is_left_behind():
    small.tokens(small.prompts(), lm(2, 2))
    assert jax.sharding.get_abstract_mesh().empty


@slow
def test_what_is_no_decoding():
    """Whole sequences, and a cache on every device, are left to the compiler."""
    ids, recipe = small.prompts([60], seed=3)[0], recipes.uniform("int8", page_size=16)
    model = lm(2, 2)
    np.testing.assert_allclose(kvjax.forward(model, ids), kvjax.forward(small.lm(), ids), atol=1e-3)
    spread, alone = (compare(m, ids, recipe=recipe, prompt_tokens=20) for m in (model, small.lm()))
    assert spread.bytes == alone.bytes and abs(spread.kl_mean - alone.kl_mean) < 1e-5
