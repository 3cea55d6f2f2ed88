"""Answers on several devices are those on one."""

import dataclasses
import functools

import pytest

import kvjax
from kvjax.sharding import device_mesh
from tests.decoding import small
from tests.decoding.test_inflight import RECIPES
from tests.models import goldens

slow = pytest.mark.slow
MESHES = {"tp2": (2, 1), "tp4": (4, 1), "dp2": (1, 2), "dp2 tp2": (2, 2)}


@functools.cache
def lm(tp: int, dp: int, name: str = "llama") -> kvjax.LanguageModel:
    """A golden model on several devices, with room for long rows."""
    model = kvjax.load(goldens.FOLDER / name, mesh=device_mesh(tp, dp))
    config = dataclasses.replace(model.config, context_length=1 << 14)
    return dataclasses.replace(model, config=config)


def of_recipe(name: str, model, text_lm) -> list[tuple[int, ...]]:
    recipe = RECIPES[name]
    if recipe.needs_text:
        model = dataclasses.replace(model, tokenizer=text_lm.tokenizer)
    return small.tokens(
        small.prompts([40, 63, 33, 57, 48, 50], seed=5),
        model,
        recipe=recipe,
        max_new_tokens=112 if recipe.segmenter else 64,
        batch_size=4,
        repetition_stop=False,
    )


@pytest.mark.parametrize("size", MESHES.values(), ids=MESHES)
def test_full(size):
    """As many devices as KV heads, more of them, and rows of their own."""
    assert tuple(small.tokens(small.prompts(), lm(*size))) == small.usual()


QUICK = ()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else slow) for n in RECIPES]
)
def test_every_recipe(name, text_lm):
    assert of_recipe(name, lm(2, 1), text_lm) == of_recipe(name, small.lm(), text_lm)
