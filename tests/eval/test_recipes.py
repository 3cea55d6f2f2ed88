"""Shares of a bare cache become the budgets whose bytes they are."""

import fractions

import pytest

from kvjax.cache import plan
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
