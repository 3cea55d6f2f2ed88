"""Shares of a bare cache become the budgets whose bytes they are."""

import fractions

import pytest

from kvjax.cache import plan
from kvjax.errors import UsageError
from kvjax.eval.options import EvalConfig
from kvjax.eval.recipes import Work, read_recipes, settle, shape_of
from kvjax.recipes import full
from tests.cli.conftest import model  # noqa: F401

PAGE = 16


@pytest.fixture
def settled(model, tmp_path):  # noqa: F811
    def of(text, work, dtype="float32"):
        path = tmp_path / "recipes.yaml"
        path.write_text(text)
        config = EvalConfig(model=str(model), recipes=str(path), dtype=dtype)
        return [settle(one, shape_of(config), work, 2) for one in read_recipes(config)]

    return of


@pytest.fixture
def token(model) -> int:  # noqa: F811
    """Bytes of a token in a bare bfloat16 cache."""
    shape = shape_of(EvalConfig(model=str(model)))
    size = {"batch_size": 1, "prompt_tokens": 1, "max_new_tokens": 1, "parameter_bytes": 0}
    return plan(shape.config, full(), dtype="bfloat16", **size).geometry.full_token_bytes


def entry(name: str, **keys) -> str:
    words = [f"{key}: {value}" for key, value in {"page_size": PAGE, **keys}.items()]
    return f"- {{name: {name}, {', '.join(words)}}}\n"


def test_a_share_is_of_prompt_and_answer_together(settled, token):
    text = entry("half", method="streaming", share="1/2")
    text += entry("half coded", method="streaming", share="1/2", kv_bits=4)
    text += entry("quarter", method="streaming", share="1/4")
    text += entry("other", method="rkv", share="1/4")
    work = Work([2000, 2096], 24)
    found = settled(text, work)
    for one in found:
        limit = one.named.share * token * (2048 + 24)
        # A page of every KV head does not fit any more.
        assert limit - 2 * PAGE * token < one.row_bytes <= limit, one.name
    half, coded, quarter, other = (one.recipe.budget for one in found)
    assert coded > 2 * half and half > 1.8 * quarter > 1.8 * other
    assert [one.recipe for one in settled(text, work, "bfloat16")] == [one.recipe for one in found]


def test_a_share_beside_the_prompt_leaves_it_on_top(settled, token):
    text = entry("control", method="random", share="1/2", protect_prompt="true")
    text += "- {method: thinkv, share: 1/2}"
    (short, thoughts), (long, others) = (
        settled(text, Work(prompts, 2500, True, 2000)) for prompts in ([64], [500, 700])
    )
    assert long.recipe.budget - short.recipe.budget == 600 - 64
    assert thoughts.recipe.budget == others.recipe.budget
    assert short.row_bytes <= token * (64 + PAGE + 1000)
    assert 600 < short.recipe.budget - 64 < 1000


def test_what_takes_more_than_its_share_is_refused_with_the_bytes(settled):
    text = "- {method: rkv, share: 1/99}\n- method: full"
    whole, tiny = settled(text, Work([500], 20))
    assert whole.recipe is not None and whole.named.is_full
    assert tiny.recipe is None and "fewest tokens (37)" in tiny.refused
    [below] = settled("- {method: random, kv_budget: 64, protect_prompt: true}", Work([500], 20))
    assert "--kv-budget 64 is below a prompt of 500" in below.refused


def test_shares_are_fractions_or_decimals(settled):
    text = entry("a", method="rkv", share="1/4") + entry("b", method="rkv", share=0.25)
    found = settled(text, Work([4000], 96))
    assert [one.named.share for one in found] == [fractions.Fraction(1, 4)] * 2
    assert found[0].recipe == found[1].recipe
    [named] = settled("- {method: rkv, share: 1/4}", Work([4000], 96))
    assert named.name == "rkv 1/4" and named.as_dict()["share"] == "1/4"


def test_tokens_are_those_of_the_answer_and_the_prompt_comes_on_top(settled):
    text = "- {method: random, tokens: 1/2, protect_prompt: true}\n"
    text += "- {name: few, method: streaming, tokens: 260, protect_prompt: true}\n"
    text += "- {method: thinkv, tokens: 1/2}"
    work = Work([100, 141], 1300, True, 1001)
    half, few, thoughts = settled(text, work)
    assert [one.recipe.budget for one in (half, few, thoughts)] == [621, 380, 500]
    assert half.name == "random 1/2 of the tokens" and few.name == "few"
    assert [one.as_dict()["share"] for one in (half, few)] == ["1/2 of the tokens", "260 tokens"]
    [together] = settled("- {method: random, tokens: 1/2}", Work([100, 141], 1300))
    assert together.recipe.budget == round((120.5 + 1300) / 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{method: rkv, tokens: 3/2}", "whole number"),
        ("{method: rkv, tokens: 0}", "whole number"),
        ("{method: uniform, tokens: 1/2}", "tokens is for methods that evict"),
        ("{method: rkv, tokens: 1/2, share: 1/2}", "share and tokens exclude"),
        ("{method: rkv, tokens: 1/2, kv_budget: 100}", "tokens and a budget exclude"),
    ],
)
def test_tokens_that_cannot_work_are_refused(settled, text, message):
    with pytest.raises(UsageError, match=message):
        settled(f"- {text}", Work([100], 20))


def test_only_some_take_part(tmp_path):
    path = tmp_path / "recipes.yaml"
    path.write_text("- {method: rkv, share: 1/4}\n- {method: rkv, share: 1/8}\n- method: full\n")

    def names(only):
        return [one.name for one in read_recipes(EvalConfig(recipes=str(path), only=only))]

    assert names(None) == ["full", "rkv 1/4", "rkv 1/8"]
    assert names("rkv 1/4|full") == ["full", "rkv 1/4"] and names("rkv.*") == ["rkv 1/4", "rkv 1/8"]
    for only, message in (("rkv", "no recipe; there are rkv 1/4"), ("(", "expression")):
        with pytest.raises(UsageError, match=message):
            names(only)
