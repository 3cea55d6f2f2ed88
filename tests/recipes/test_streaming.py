"""Streaming end to end: it chooses what dense attention over the tokens left would have chosen.

Its evictions are known beforehand, so nothing here looks into the cache.
"""

import numpy as np
import pytest

import kvjax
from kvjax import recipes
from tests.decoding import small
from tests.recipes import oracle

BUDGET, SINKS, NEW = 56, 4, 70


def decode(lm, prompts, recipe, new=NEW, **options):
    results = kvjax.generate(
        lm,
        prompts,
        recipe=recipe,
        max_new_tokens=new,
        stop_ids=(),
        repetition_stop=False,
        **options,
    )
    assert [result.finish_reason for result in results] == ["length"] * len(prompts)
    return [list(result.tokens) for result in results]


def expected(lm, prompt, answer, *, every=16, contiguous=False):
    """The oracle's choice at every position, given the tokens before it."""
    end = len(prompt) + len(answer)
    tokens = [*prompt, *answer] + [0] * (LONGEST - end)  # of one length, so compiled once
    cuts = oracle.streaming_cuts(len(prompt), len(tokens), BUDGET, SINKS, every)
    seen = oracle.streaming_seen(cuts, SINKS, lm.config.windows)
    back = None
    if contiguous:
        gap = np.maximum(cuts - SINKS, 0)
        back = np.where(np.arange(len(tokens))[None] < SINKS, gap[:, None], 0)
    return oracle.greedy(lm, tokens, len(prompt), end, seen=seen, back=back)


PROMPTS = small.prompts([40, 75, 9, 56, 57])
LONGEST = max(map(len, PROMPTS)) + NEW


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        pytest.param("llama", {"every": 32, "page_size": 4}, marks=pytest.mark.slow),
        pytest.param("qwen2_window", {"page_size": 8}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {}, marks=pytest.mark.slow),
        pytest.param("qwen3", {"tick": 8, "every": 8, "window": 8}, marks=pytest.mark.slow),
        pytest.param("llama", {"tick": 1, "every": 1}, marks=pytest.mark.slow),
    ],
)
def test_original_positions(name, options):
    lm = small.lm(name)
    recipe = recipes.streaming(**{"budget": BUDGET, "sinks": SINKS, "page_size": 16} | options)
    for prompt, answer in zip(PROMPTS, decode(lm, PROMPTS, recipe), strict=True):
        assert answer == expected(lm, prompt, answer, every=recipe.every)


def test_contiguous_positions():
    lm = small.lm("llama")
    recipe = recipes.streaming(budget=BUDGET, sinks=SINKS, page_size=16, positions="contiguous")
    prompts = PROMPTS[:3]
    answers = decode(lm, prompts, recipe)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == expected(lm, prompt, answer, contiguous=True)
    # The oracle tells the two apart.
    assert answers[1] != expected(lm, prompts[1], answers[1])
