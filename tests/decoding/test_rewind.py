"""Going back: as if what came later had never been, or a refusal."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax import recipes
from tests.decoding import small
from tests.decoding.small import PAGE
from tests.decoding.test_conversation import (
    RECIPES,
    decode,
    kept,
    model_of,
    near,
    prompt_of,
    same,
)

slow = pytest.mark.slow


def back(conversation: kvjax.Conversation, tokens: int) -> kvjax.Conversation:
    return kvjax.rewind(small.lm(), conversation, tokens)


@pytest.mark.parametrize("count", [41, 48, 49, 55])
def test_full_is_as_if_the_rest_had_never_been(count):
    """On and off a page's border."""
    whole, answered = kept("full", 32), count - len(prompt_of(RECIPES["full"]))
    again = back(whole, count)
    assert again.tokens == whole.tokens[:count] and again.answered == answered
    same(again, kept("full", answered))
    same(decode([], new=32 - answered, cache=again).cache, whole)
    assert whole.length == 55  # and is as it was


def test_into_the_prompt():
    again = back(kept(), 10)
    assert (again.length, again.prompt, again.answered) == (9, 9, 0)
    on, lone = decode([], new=40, cache=again), decode(list(again.tokens), new=40)
    assert on.tokens == lone.tokens
    for name in [name for name in again.row if name.endswith((".k", ".pos"))]:
        np.testing.assert_allclose(on.cache.row[name], lone.cache.row[name], atol=1e-4)


@pytest.mark.parametrize("count", [0, 1, 42, -3])
def test_there_are_not_so_many(count):
    with pytest.raises(kvjax.UsageError, match="between 2 and 41"):
        back(kept(), count)


@slow
def test_streaming_goes_back_to_the_last_selection():
    """Every 32 steps: of 40 + 45 tokens the last was at 72."""
    streaming = RECIPES["streaming"]
    conversation = decode(prompt_of(streaming), streaming, 45).cache
    with pytest.raises(kvjax.UsageError, match="The earliest is 74"):
        back(conversation, 73)
    with pytest.raises(kvjax.UsageError, match="saved before"):
        back(conversation, 20)
    again = back(conversation, 74)
    same(again, decode(prompt_of(streaming), streaming, 34).cache)
    assert back(conversation, 5).length == 4  # its sinks are all that there was


@slow
@pytest.mark.parametrize("name", ["rkv", "h2o", "tova", "snapkv_decode"])
def test_queries_of_later_tokens_are_not_asked(name):
    conversation = kept(name)
    with pytest.raises(kvjax.UsageError, match=f"The earliest is {len(conversation.tokens)}"):
        back(conversation, len(conversation.tokens) - 1)


@slow
@pytest.mark.parametrize("name", ["uniform", "snapkv", "thinkv", "thinkv past", "kivi", "random"])
@pytest.mark.parametrize("steps", [1, 3, 9])
def test_within_a_tick_it_is_as_if_the_rest_had_never_been(name, steps, text_lm):
    recipe = RECIPES[name]
    how = {"model": model_of(recipe, text_lm)}
    conversation = decode(prompt_of(recipe), recipe, 107, **how).cache  # ten steps into a tick
    again = back(conversation, len(conversation.tokens) - steps)
    expected = decode(prompt_of(recipe), recipe, 107 - steps, **how).cache
    if name == "snapkv":  # asks no queries any more, but has later ones; its pools differ in size
        names = [name for name in again.row if not name.endswith("queries")]
        near(*(dataclasses.replace(c, row={n: c.row[n] for n in names}) for c in (again, expected)))
    elif name == "kivi" and steps > 1:  # near its end a run codes no more than it needs room for
        assert again.tokens == expected.tokens and again.row["stored"] >= expected.row["stored"]
        held = [tokens_of(c, 0).keys() | tokens_of(c, 1).keys() for c in (again, expected)]
        assert held[0] == held[1]
    else:
        same(again, expected)


def tokens_of(conversation: kvjax.Conversation, index: int, *names: str) -> dict:
    """What the first layer's class holds of a head and position, in arrays with slots second."""
    row, found = conversation.row, {}
    pages, pos = row[f"0.{index}.pages"], row[f"0.{index}.pos"]
    heads = np.repeat(np.arange(len(pages)), pages)
    for page, slot in np.argwhere(pos >= 0):
        what = [row[f"0.{index}.{name}"][page, slot].tobytes() for name in names]
        found[heads[page], pos[page, slot]] = what
    return found


@slow
def test_what_was_coded_since_stays_coded():
    uniform = RECIPES["uniform"]
    conversation = decode(prompt_of(uniform), uniform, 100).cache
    again, short = back(conversation, 60), decode(prompt_of(uniform), uniform, 20).cache
    assert again.tokens == short.tokens and again.row["stored"] == 59 > short.row["stored"]
    early, since = (tokens_of(c, 1, "k", "k_scale", "bias") for c in (short, again))
    assert early and early.items() <= since.items() and len(since) > len(early)
    on = decode(list(range(40)), uniform, 30, cache=again)
    assert len(on.tokens) == 30 and on.cache.length == 59 + 1 + 40 + 29


@slow
@pytest.mark.parametrize("name", ["qwen3_window", "gpt_oss"])
def test_a_window_that_has_moved_on_is_refused(name):
    lm = small.lm(name)
    recipe = recipes.full(PAGE)
    prompt = small.prompts([40], seed=5)[0]
    how = {"model": lm, "recipe": recipe}
    conversation = decode(prompt, new=40, **how).cache
    assert any(lm.config.windows)
    with pytest.raises(kvjax.UsageError, match="The earliest is"):
        kvjax.rewind(lm, conversation, 45)
    near = kvjax.rewind(lm, conversation, 79)  # a token behind the window may be gone
    on = decode([], new=1, cache=near, **how)
    same(on.cache, conversation)
