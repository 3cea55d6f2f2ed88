"""The count of right answers: what it takes for right, and how it tells a recipe's settings."""

import argparse
import json

import numpy as np
import pytest
import scipy.stats

import kvjax
from kvjax.decoding import Result
from kvjax.errors import UsageError
from kvjax.eval import reasoner
from kvjax.eval.intervals import mcnemar, wilson
from kvjax.models.config import ModelConfig
from kvjax.train.reasoner.export import export
from kvjax.train.reasoner.model import CONFIG, init
from kvjax.train.reasoner.task import problem


@pytest.mark.parametrize(("right", "count"), [(0, 7), (7, 7), (128, 256), (250, 256)])
def test_wilson_is_scipys(right, count):
    found = scipy.stats.binomtest(right, count).proportion_ci(method="wilson")
    np.testing.assert_allclose(wilson(right, count), (found.low, found.high), atol=1e-6)


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (3, 3), (10, 2), (0, 6)])
def test_mcnemar_is_a_fair_coin(lost, won):
    expected = scipy.stats.binomtest(lost, lost + won).pvalue if lost + won else 1.0
    assert mcnemar(lost, won) == pytest.approx(expected) == mcnemar(won, lost)


def test_budgets_are_of_the_trace_and_the_prompt_comes_on_top():
    recipe = reasoner.read_recipe("random:0.5", 1000, 120)
    assert (recipe.name, recipe.budget, recipe.protect_prompt) == ("random", 620, True)
    assert reasoner.read_recipe("streaming:256", 1000, 120).budget == 376
    rkv = reasoner.read_recipe("rkv:0.25:int4", 2000, 200)
    assert (rkv.budget, rkv.codec) == (700, "int4")
    assert reasoner.read_recipe("thinkv:0.5", 1000, 120).budget == 500
    assert reasoner.read_recipe("uniform::k4v2", 1000, 120).codec == "k4v2"
    assert reasoner.read_recipe("full", 1000, 120).keeps_all


@pytest.mark.parametrize("spec", ["random", "random:half", "full:0.5", "nothing:0.5"])
def test_recipes_that_say_nothing_are_refused(spec):
    with pytest.raises(UsageError):
        reasoner.read_recipe(spec, 1000, 120)


def args_of(**given) -> argparse.Namespace:
    default = {
        "levels": [200],
        "problems": 3,
        "first": 0,
        "recipes": ["full", "streaming:0.5", "random", "h2o:0.5"],
        "limit": 1.5,
        "batch_size": 4,
        "dtype": "float32",
        "seed": 0,
        "commit": "here",
        "out": None,
    }
    return argparse.Namespace(**{**default, **given})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    fields = {**CONFIG, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    directory = tmp_path_factory.mktemp("reasoner")
    export(directory, fields, init(ModelConfig.from_hf(fields), 0), "nothing")
    return directory


def test_right_answers_are_counted_and_paired(model, monkeypatch, tmp_path):
    problems = [problem(200, index) for index in range(3)]
    traces = [found.tokens[found.prompt :] for found in problems]
    other = problem(200, 9)
    assert other.answer != problems[2].answer
    report = {"kv": {"live_tokens": {"max": 1.0}, "ratio": {"peak": 0.5}}}

    def generate(lm, prompts, *, recipe, **options):
        assert prompts == [list(found.tokens[: found.prompt]) for found in problems]
        wrong, late = other.tokens[other.prompt :], traces[1][:1] * 150 + traces[1]
        given = {"full": traces, "h2o": [late, late, late]}.get(recipe.name)
        given = given or [traces[0], traces[1][1:], wrong]
        assert options["max_new_tokens"] == round(1.5 * max(map(len, traces)))
        return [Result("", tuple(tokens), "stop", 1, report=report) for tokens in given]

    monkeypatch.setattr(kvjax, "generate", generate)
    found = reasoner.run(args_of(model=model, out=tmp_path / "found.json"))
    full, streaming, refused, h2o = found["results"]
    assert (h2o["right"], h2o["late"]) == (0, 1) and full["late"] == 0
    assert (full["right"], full["exact"], full["length"]) == (3, 3, 1.0)
    assert (streaming["right"], streaming["exact"]) == (2, 1)
    assert streaming["paired"] == {"lost": 1, "won": 0, "p": 1.0}
    assert "budget" in refused["refused"]
    assert json.loads((tmp_path / "found.json").read_text())["results"][1]["ratio_peak"] == 0.5


def test_it_decodes_with_the_model(model):
    found = reasoner.run(args_of(model=model, recipes=["full"], limit=0.05))
    [full] = found["results"]
    assert full["right"] == 0 and full["ends"] == {"length": 3}
    assert all(row["length"] < 0.06 for row in full["rows"])
