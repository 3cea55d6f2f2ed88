"""Latents that are gone on from, as if the run had never ended, and gone back in."""

import dataclasses

import numpy as np
import pytest

import kvjax
from tests.dynakv.decoding import OPTIONS, saved, spectra
from tests.dynakv.tiny import tiny, tokens


def near(left: kvjax.Conversation, right: kvjax.Conversation) -> None:
    """The same but for sums, which pools of another size round otherwise."""
    assert left == right and left.row.keys() == right.row.keys()
    for name, array in left.row.items():
        if array.dtype.kind == "f":
            np.testing.assert_allclose(array, right.row[name], atol=1e-4, err_msg=name)
        else:
            assert (array == right.row[name]).all(), name


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
