"""What every recipe that evicts must keep to, whatever it selects."""

import numpy as np
import pytest

import kvjax
from kvjax import recipes
from kvjax.compress.selectors import Streaming
from kvjax.errors import UsageError
from kvjax.thoughts import Given
from tests.decoding import small

EVICTING = ("streaming", "random", "h2o", "tova", "snapkv", "snapkv_decode", "rkv", "pam")
NEW = 48
OPTIONS = {"page_size": 16, "sinks": 4, "recent": 16}


def made(name: str, **options):
    if name in ("rkv", "snapkv_decode", "pam"):
        options = {"every": 16} | options
    return recipes.METHODS[name](**(OPTIONS | options))


def decode(lm, prompts, recipe, new=NEW, **options):
    return kvjax.generate(
        lm,
        prompts,
        recipe=recipe,
        max_new_tokens=new,
        stop_ids=(),
        repetition_stop=False,
        **options,
    )


def tokens(results) -> list[tuple[int, ...]]:
    return [result.tokens for result in results]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("rkv", "int4"),
        ("h2o", "bf16"),
        ("random", "k4v2"),
        ("tova", "int8"),
        ("snapkv", "fp8"),
        ("pam", "int4"),
    ],
)
def test_a_row_does_not_feel_its_neighbours(name, codec):
    """Alone, beside others and at another place, with and without their padding."""
    lm = small.lm()
    recipe = made(name, codec=codec, budget=40)
    prompts = small.prompts([70, 33, 9])
    together = tokens(decode(lm, prompts, recipe))
    assert tokens(decode(lm, prompts[::-1], recipe)) == together[::-1]
    assert tokens(decode(lm, prompts[:1], recipe)) == together[:1]


def quick_ones(names, *quick: str):
    """The names as parameters; those that are not ``quick`` belong to the slow run."""
    return [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", quick_ones([*EVICTING, "uniform"], "snapkv"))
def test_a_budget_above_the_length_changes_nothing(name):
    lm = small.lm()
    prompts = small.prompts([40, 21])
    recipe = made(name, **({} if name == "uniform" else {"budget": 400}), codec="bf16")
    results = decode(lm, prompts, recipe)
    assert tokens(results) == tokens(decode(lm, prompts, recipes.full(16)))
    assert [result.report["kv"]["evictions"] for result in results] == [0, 0]


@pytest.mark.parametrize("name", quick_ones(EVICTING, "rkv"))
def test_a_smaller_budget_holds_less_and_says_something_else(name):
    lm = small.lm()
    prompts = small.prompts([90])
    held, said, owned = [], set(), []
    for budget in (40, 90):
        [result] = decode(lm, prompts, made(name, budget=budget, codec="int4"))
        kv = result.report["kv"]
        held.append(kv["live_tokens"]["end"])
        owned.append(kv["bytes"]["total_live"])
        said.add(result.tokens)
        if name != "snapkv":  # which keeps all that it decodes
            assert kv["live_tokens"]["max"] <= budget + 16 + 16
    assert held == sorted(set(held)) and owned == sorted(set(owned))
    assert len(said) > 1


BARE = {"sinks": 0, "recent": 0, "window": 1, "tick": 1, "every": 1}


@pytest.mark.parametrize(
    ("name", "budget", "options"),
    [
        ("h2o", 0.01, BARE),
        *(
            pytest.param(*case, {}, marks=pytest.mark.slow)
            for case in ((n, share) for n in ("h2o", "rkv") for share in (0.01, 0.3, 0.99))
        ),
        *(
            pytest.param("tova", budget, BARE, marks=pytest.mark.slow)
            for budget in (0.01, 0.1, 0.5, 0.99)
        ),
    ],
)
def test_shares_of_short_prompts_leave_something(name, budget, options):
    """Also where neither first nor last tokens are kept; a cache without a token would give NaN."""
    prompts, recipe = small.prompts([1, 2, 3]), made(name, budget=budget, **options)
    results = decode(small.lm(), prompts, recipe, new=20)
    assert [result.finish_reason for result in results] == ["length"] * 3
    for prompt, result in zip(prompts, results, strict=True):
        live = result.report["kv"]["live_tokens"]
        assert live["min"] >= min(len(prompt), recipe.floor)
        read = len(prompt) + 19
        assert live["end"] >= min(max(recipe.floor, budget * read), read)


def test_a_protected_prompt_stays_whole():
    lm = small.lm()
    prompts = small.prompts([60])
    recipe = made("random", budget=90, protect_prompt=True, codec="bf16")
    [result] = decode(lm, prompts, recipe)
    [free] = decode(lm, prompts, made("random", budget=90, codec="bf16"))
    assert result.report["kv"]["evictions"] == free.report["kv"]["evictions"] > 0
    assert result.tokens != free.tokens
    with pytest.raises(UsageError, match=r"prompt of 60 tokens.* pass 81"):
        decode(lm, prompts, made("random", budget=80, protect_prompt=True))


def test_layers_that_are_skipped_keep_all_and_so_does_a_phase():
    """One layer of three is compressed, and that while the prompt is read."""
    recipe = made("streaming", budget=40, skip_layers=(0, -1), compress=("prompt",))
    [result] = decode(small.lm(), small.prompts([60]), recipe)
    held = [layer["live_tokens"] for layer in result.report["kv"]["per_layer"]]
    assert held == [60 + NEW - 1, 40 + NEW - 1, 60 + NEW - 1]


def test_codecs_by_layer():
    lm = small.lm()
    recipe = recipes.uniform("int4", layer_codecs=((0, "int8"), (-1, "bf16")))
    [result] = decode(lm, small.prompts([60]), recipe, new=1)
    layers = [layer["codec"] for layer in result.report["kv"]["per_layer"]]
    assert layers == ["int8", "int4", "bf16"]
    with pytest.raises(UsageError, match="layer 3, and the model has 3"):
        decode(lm, small.prompts([9]), recipes.uniform("int4", layer_codecs=((3, "int8"),)))


def test_a_model_with_a_key_bias_is_safe_without_being_told():
    lm = small.lm("qwen2")
    [result] = decode(lm, small.prompts([40]), recipes.uniform("int4"), new=2)
    layers = [layer["codec"] for layer in result.report["kv"]["per_layer"]]
    assert layers[0] == "int8" and set(layers[1:]) == {"int4"}


def test_a_phase_that_never_comes():
    """A model without thinking has an answer alone."""
    lm = small.lm()
    prompts = small.prompts([40, 21])
    never = decode(lm, prompts, made("streaming", budget=64, compress=("think",)))
    assert [result.report["kv"]["evictions"] for result in never] == [0, 0]
    assert tokens(never) == tokens(decode(lm, prompts, recipes.full(16)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 20}, r"budget 20 .* pass 21"),
        ({"budget": 0.0}, "share between 0 and 1"),
        ({"budget": 1.5}, "share between 0 and 1"),
        ({"budget": None}, "share between 0 and 1"),
        ({"every": 24}, "pass 32"),
        ({"codec": "nvfp4"}, "shares scales among tokens"),
        ({"codec": "int3"}, "no codec is named 'int3'"),
        ({"page_size": 12}, "power of two"),
        ({"sinks": -1}, "sinks"),
        ({"compress": ("prompts",)}, "prompts"),
        ({"positions": "contiguous"}, "positions contiguous .* take selector streaming"),
        ({"positions": "shifted"}, "original or contiguous, got 'shifted'"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_made(options, message):
    with pytest.raises(UsageError, match=message):
        recipes.h2o(**(OPTIONS | {"budget": 64} | options))


def test_contiguous_positions_are_for_heads_that_keep_the_same_tokens():
    """Queries are turned back by what was evicted, which is then one number for all of them."""
    given = {"budget": 64, "positions": "contiguous"}
    assert recipes.streaming(**given).positions == "contiguous"
    with pytest.raises(UsageError, match="without head_shares"):
        recipes.streaming(**given, head_shares=((0.5, 0.5),) * 3)
    with pytest.raises(UsageError, match="take selector streaming"):
        thoughts = {"segmenter": Given(every=32), "selector": Streaming(), "prompt_budget": 64}
        recipes.thinkv(**given, **thoughts)


def test_groups_that_fit_neither_page_nor_head_are_refused():
    lm, prompts = small.lm(), small.prompts([9])
    with pytest.raises(UsageError, match="multiple of the 8 tokens"):
        decode(lm, prompts, recipes.uniform("kivi4-g8", page_size=4), new=2)
    with pytest.raises(UsageError, match=r"16 channels, which must divide .* head size of 8"):
        decode(lm, prompts, recipes.uniform("nvfp4"), new=2)


def test_groups_of_tokens_leave_the_recent_window_together():
    [result] = decode(small.lm(), small.prompts([50]), recipes.kivi("kivi4-g8", window=12))
    assert result.finish_reason == "length"
    kv = result.report["kv"]
    assert kv["live_tokens"]["end"] == kv["logical_tokens"] == 50 + NEW - 1


@pytest.mark.parametrize("length", [30, pytest.param(39, marks=pytest.mark.slow)])
def test_layers_in_groups_of_tokens_lose_nothing_in_the_others(length):
    """All layers then let tokens go in such groups, and must have the room until then."""
    recipe = recipes.uniform("bf16", page_size=16, layer_codecs=((1, "kivi4-g8"),))
    [result] = decode(small.lm(), small.prompts([length]), recipe)
    held = [layer["live_tokens"] for layer in result.report["kv"]["per_layer"]]
    assert held == [length + NEW - 1] * 3


def test_a_width_means_kivi_s_own_codec_and_others_are_refused():
    assert recipes.kivi("int4") == recipes.kivi("4") == recipes.kivi("kivi4")
    assert recipes.kivi("int4") == recipes.parse("kivi", codec="4")
    assert (recipes.kivi("2").codec, recipes.kivi("2").tick) == ("kivi2", 32)
    assert recipes.kivi("kivi2-g64").tick == 64
    for codec in ("int8", "nvfp4", "bf16", "k4v2"):
        with pytest.raises(UsageError, match=f"codec {codec} is not KIVI's"):
            recipes.kivi(codec)


def test_random_draws_by_its_seed():
    lm = small.lm()
    prompts = small.prompts([60])
    recipe = made("random", budget=90, codec="bf16")
    first, again, other = (decode(lm, prompts, recipe, seed=seed)[0].tokens for seed in (1, 1, 2))
    assert first == again != other
    assert np.unique(first).size > 1
