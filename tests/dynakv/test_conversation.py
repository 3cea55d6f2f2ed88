"""Latents that are gone on from, as if the run had never ended, and gone back in."""

import pytest

import kvjax
from tests.decoding.test_conversation import same
from tests.dynakv.decoding import OPTIONS, saved, spectra
from tests.dynakv.tiny import tiny, tokens


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_two_halves_are_the_whole(rate, tmp_path):
    """Also where some blocks find no room."""
    lm = tiny("llama", 2)
    recipe = kvjax.recipes.dynakv(saved(tmp_path / "a", spectra(), lm), rate=rate, **OPTIONS)
    prompt = tokens(lm, (1, 50))[0].tolist()
    how = {"recipe": recipe, "keep_cache": True, "stop_ids": (), "repetition_stop": False}

    def decode(prompt, new, **more):
        return kvjax.generate(lm, [prompt], max_new_tokens=new, **how, **more)[0]

    whole, first = decode(prompt, 48), decode(prompt, 23)
    assert first.tokens == whole.tokens[:23]
    kvjax.save_cache(first.cache, tmp_path / "cache")
    # An adapter is its arrays, wherever they lie.
    moved = kvjax.recipes.dynakv(saved(tmp_path / "b", spectra(), lm), rate=rate, **OPTIONS)
    loaded = kvjax.load_cache(lm, tmp_path / "cache", recipe=moved)
    again = kvjax.generate(lm, [[]], max_new_tokens=25, cache=loaded, **(how | {"recipe": moved}))[
        0
    ]
    assert first.tokens + again.tokens == whole.tokens
    on = decode([], 25, cache=first.cache)
    same(on.cache, whole.cache)
    assert (whole.cache.row["crowded"] > 0) == (rate < 1)
    same(kvjax.rewind(lm, whole.cache, 50 + 45), decode(prompt, 45).cache)
    other = kvjax.recipes.dynakv(
        saved(tmp_path / "c", spectra(), lm), rate=rate, tau=0.2, **OPTIONS
    )
    with pytest.raises(kvjax.UsageError, match="kept with projector"):
        kvjax.load_cache(lm, tmp_path / "cache", recipe=other)
