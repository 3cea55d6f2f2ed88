"""The reasoner that lies in the repository."""

import pathlib

import pytest

import kvjax
from kvjax.thoughts.calibration import Calibration
from kvjax.train.reasoner.task import answer_of, problem

MODEL = pathlib.Path(__file__).parents[2] / "eval" / "models" / "reasoner"


@pytest.fixture(scope="module")
def lm():
    return kvjax.load(MODEL)


def test_it_solves_unseen_problems_token_for_token(lm):
    problems = [problem(200, index) for index in range(3)]
    prompts = [list(one.tokens[: one.prompt]) for one in problems]
    results = kvjax.generate(lm, prompts, max_new_tokens=300, temperature=0.0)
    for found, one in zip(results, problems, strict=True):
        assert tuple(found.tokens) == one.tokens[one.prompt :]
        assert answer_of(found.tokens) == one.answer


def test_it_is_small_and_says_what_it_is(lm):
    assert lm.config.family == "qwen3"
    assert (MODEL / "model.safetensors").stat().st_size < 16e6
    card = (MODEL / "README.md").read_text()
    assert "python -m kvjax.train.reasoner --steps" in card and "Apache-2.0" in card


def test_its_calibration_is_shipped_and_finds_no_layer(lm):
    assert Calibration.shipped(lm.fingerprint).layers == ()
