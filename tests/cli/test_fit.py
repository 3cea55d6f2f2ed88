"""Recipes that are chosen to fit: ``--fit`` and ``--kv-budget-bytes``."""

import json

import pytest

import kvjax
from kvjax import recipes
from kvjax.command.decode_options import DecodeConfig
from kvjax.command.fit import candidates, settled_recipe
from kvjax.command.outline import outline
from kvjax.command.prompts import Row
from kvjax.errors import CapacityError, UsageError

NEW = 3000


def config(model, **more) -> DecodeConfig:
    return DecodeConfig(model=str(model), max_new_tokens=NEW, **more)


@pytest.fixture(scope="module")
def outlined(model):
    """A run of one prompt on the small model."""
    return outline(config(model), [Row(1, "hello")])


def need(outlined, recipe) -> int:
    planned = outlined.plan(recipe)
    return planned.nbytes


def test_candidates_get_smaller(model, outlined):
    tried = list(candidates(config(model, fit="1GiB"), outlined))
    assert [recipe.name for recipe in tried[:4]] == ["full", "uniform", "uniform", "snapkv_decode"]
    sizes = [need(outlined, recipe) for recipe in tried]
    assert sizes == sorted(sizes, reverse=True)
    tokens = outlined.plan(recipes.full()).tokens
    assert [recipe.budget for recipe in tried[3:]] == [-(-tokens // n) for n in (2, 4, 8, 16, 32)]


def test_fit_takes_the_first_that_fits(model, outlined):
    tried = list(candidates(config(model, fit="1GiB"), outlined))
    for recipe in tried[::2]:
        enough = need(outlined, recipe)
        assert settled_recipe(config(model, fit=f"{enough}"), outlined) == recipe
        assert outlined.plan(recipe, enough).largest_batch() == 1
    enough = need(outlined, tried[-1])
    with pytest.raises(CapacityError) as error:
        settled_recipe(config(model, fit=f"{enough - 1}"), outlined)
    message = str(error.value)
    assert f"--fit {enough - 1}: 1 rows of {NEW + 16} tokens need at least" in message
    assert "snapkv_decode, int4, a budget of 95 tokens" in message
    assert "--batch-size" in message


def test_what_has_to_stay_stays_in_what_fit_chooses(model, outlined):
    kept = {"sink_tokens": 8, "recent_window": 200, "protect_prompt": True, "skip_layers": "0"}
    *_, smallest = candidates(config(model, fit="1GiB", **kept), outlined)
    assert (smallest.sinks, smallest.recent, smallest.protect_prompt) == (8, 200, True)
    assert smallest.skip_layers == (0,)
    assert smallest.budget == smallest.floor + outlined.prompt_tokens


def test_fit_tells_what_it_chose(decode):
    argv = ["-p", "hello", "--fit", "1GiB", "--max-new-tokens", 40]
    outcome = decode(*argv, "--format", "json")
    assert outcome.code == 0
    assert outcome.err.startswith("kvjax: --fit 1GiB chose full (")
    record = json.loads(outcome.out)
    assert record["kv"]["method"] == record["run"]["recipe"]["name"] == "full"
    assert record["run"]["fit"] == "1GiB"
    assert decode(*argv, "--quiet").err == ""


def test_fit_chooses_for_plans_and_runs(decode, outlined, monkeypatch):
    enough = need(outlined, recipes.uniform("int4"))
    argv = ["-p", "hello", "--fit", enough, "--max-new-tokens", NEW]
    plan = decode(*argv, "--plan")
    assert plan.code == 0 and "uniform" in plan.out and "int4" in plan.out
    used = []

    def stream(lm, prompts, *, recipe, **_):
        used.append(recipe)
        return iter(())

    monkeypatch.setattr(kvjax, "stream", stream)
    assert decode(*argv).err.startswith(f"kvjax: --fit {enough} chose uniform, int4 (")
    assert used == [recipes.uniform("int4")]


def test_nothing_fits_is_code_4_before_weights_load(decode, monkeypatch):
    monkeypatch.setattr(kvjax, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    outcome = decode("-p", "hello", "--fit", "100KiB")
    assert (outcome.code, outcome.out) == (4, "")
    assert outcome.err.count("\n") == 1 and "pass --fit 1MiB" in outcome.err


@pytest.mark.parametrize("method", ["h2o", "rkv", "snapkv_decode"])
def test_bytes_become_the_largest_budget_that_keeps_to_them(model, outlined, method):
    limit = 300_000
    given = config(model, method=method, kv_budget_bytes=f"{limit}", kv_bits="8")
    recipe = settled_recipe(given, outlined)

    def taken(budget: int) -> int:
        same = recipes.parse(method, codec="int8", budget=budget)
        return outlined.plan(same).geometry.row_bytes

    assert recipe == recipes.parse(method, codec="int8", budget=recipe.budget)
    assert taken(recipe.budget) <= limit < taken(recipe.budget + 1)


def test_bytes_for_everything_evict_nothing(model, outlined):
    given = config(model, method="h2o", kv_budget_bytes="1GiB")
    assert settled_recipe(given, outlined).budget == outlined.plan(recipes.full()).tokens


def test_too_few_bytes_are_refused_with_what_would_do(model, outlined):
    given = config(model, method="h2o", kv_budget_bytes="1000", protect_prompt=True)
    with pytest.raises(UsageError, match=r"h2o keeps at least 47 tokens") as error:
        settled_recipe(given, outlined)
    needed = str(error.value).partition("pass ")[2].split()[0]
    enough = config(model, method="h2o", kv_budget_bytes=needed, protect_prompt=True)
    assert settled_recipe(enough, outlined).budget >= 47
