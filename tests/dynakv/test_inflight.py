"""Rows with latents that refill: a row's share of blocks is its own, whoever was there before."""

import pytest

import kvjax
from tests.dynakv.decoding import OPTIONS, saved, spectra
from tests.dynakv.tiny import tiny, tokens

SAMPLED = {"temperature": 0.9, "seed": 3}


@pytest.mark.slow
def test_answers_are_those_alone(tmp_path):
    """Some blocks find no room, the same ones; samples go on from one prompt's latents."""
    lm = tiny("llama", 2)
    recipe = kvjax.recipes.dynakv(saved(tmp_path, spectra(), lm), rate=0.3, **OPTIONS)
    prompts = [tokens(lm, (1, count))[0].tolist() for count in (50, 37, 61, 44)]
    how = {"recipe": recipe, "max_new_tokens": 48, "batch_size": 2, "stop_ids": range(0, 96, 24)}
    together = kvjax.generate(lm, prompts, **how, **SAMPLED)
    apart = [kvjax.generate(lm, [prompt], **how, **SAMPLED)[0] for prompt in prompts]
    several = kvjax.generate(lm, prompts[:2], samples=2, **how, **SAMPLED)
    assert len({len(result.tokens) for result in together}) > 1
    for mine, own in zip((*together, *several[::2]), (*apart, *apart[:2]), strict=True):
        assert mine.tokens == own.tokens
        for figure in ("crowded", "rates", "live_tokens"):
            assert mine.report["kv"][figure] == own.report["kv"][figure]
    assert all(result.report["kv"]["crowded"] for result in together)
