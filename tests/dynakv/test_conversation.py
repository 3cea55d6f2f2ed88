"""Latents that are gone on from, as if the run had never ended, and gone back in."""

import dataclasses

import pytest

import kvjax
from tests.decoding.test_conversation import near
from tests.dynakv.decoding import OPTIONS, saved, spectra
from tests.dynakv.tiny import tiny, tokens


@pytest.mark.slow
def test_two_halves_are_the_whole(tmp_path):
    lm = tiny("llama", 2)
    how = {"keep_cache": True, "stop_ids": (), "repetition_stop": False}
    prompt = tokens(lm, (1, 50))[0].tolist()

    def adapter(name, **options):
        folder = saved(tmp_path / name, spectra(), lm)
        return kvjax.recipes.dynakv(folder, rate=1.0, **OPTIONS, **options)

    def decode(prompt, new, recipe, **more):
        return kvjax.generate(lm, [prompt], recipe=recipe, max_new_tokens=new, **how, **more)[0]

    recipe, path = adapter("a"), tmp_path / "cache"
    whole, first = decode(prompt, 48, recipe), decode(prompt, 23, recipe)
    kvjax.save_cache(first.cache, path)
    moved = adapter("b")  # an adapter is its arrays, wherever they lie
    on = decode([], 25, moved, cache=kvjax.load_cache(lm, path, recipe=moved))
    assert first.tokens + on.tokens == whole.tokens
    near(dataclasses.replace(on.cache, recipe=recipe), whole.cache)
    near(kvjax.rewind(lm, whole.cache, 50 + 45), decode(prompt, 45, recipe).cache)
    with pytest.raises(kvjax.UsageError, match="kept with projector"):
        kvjax.load_cache(lm, path, recipe=adapter("c", tau=0.2))
