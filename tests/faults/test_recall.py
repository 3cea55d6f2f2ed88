"""A prompt of four times the budget, whose question is about its last record."""

import functools
import random

import pytest

import kvjax
from kvjax import recipes
from tests import smollm2

BUDGET = 96
NAMES = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Frank",
    "Grace",
    "Henry",
    "Iris",
    "Jack",
    "Kate",
    "Leo",
    "Mary",
    "Noah",
    "Olive",
    "Paul",
]


@functools.cache
def model() -> kvjax.LanguageModel:
    return kvjax.load(smollm2.path())


@functools.cache
def prompts() -> list[tuple[str, str]]:
    """Texts and the code that each asks for."""
    found, encode = [], model().tokenizer.encode
    for seed in range(3):
        rng = random.Random(seed)
        text = "Records of the hotel. Each guest has a room and a key code.\n"
        while len(encode(text)) < 4 * BUDGET:
            text += f"The key code of {rng.choice(NAMES)} is {rng.randint(10000, 99999)}.\n"
        code = str(rng.randint(10000, 99999))
        question = "\nQuestion: what is the key code of Zoe?\nAnswer: The key code of Zoe is"
        found.append((f"{text}The key code of Zoe is {code}.\n{question}", code))
    return found


def recalled(recipe) -> int:
    """How many of the prompts are answered."""
    results = kvjax.generate(
        model(), [text for text, _ in prompts()], recipe=recipe, max_new_tokens=8, chat=False
    )
    return sum(code in result.text for (_, code), result in zip(prompts(), results, strict=True))


@pytest.mark.slow
def test_the_last_record_is_recalled_from_a_prompt_of_four_budgets():
    assert recalled(recipes.full()) == 3
    for make in (recipes.streaming, recipes.h2o, recipes.snapkv):
        assert recalled(make(budget=BUDGET)) == 3, make.__name__
    # Without the first and the last tokens, of which luck keeps a quarter, it is not.
    assert recalled(recipes.random(budget=BUDGET, sinks=0, recent=0, window=1)) <= 1
