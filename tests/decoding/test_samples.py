"""Several answers to a prompt that is read once."""

import dataclasses
import importlib

import numpy as np
import pytest

import kvjax
from kvjax import recipes
from kvjax.cache import init_cache, plan
from kvjax.decoding.chunk import idle_state
from kvjax.decoding.fill import continue_prompt, drop_prompt, empty_rows, lent_pages, park_prompt
from kvjax.decoding.requests import Request
from pallas_kernels import SCRATCH_PAGE
from tests.decoding import small
from tests.decoding.small import NEW, PAGE, ROWS, SAMPLED
from tests.decoding.test_inflight import RECIPES, STOPS, answers, loop_options, owned

slow = pytest.mark.slow


def one_by_one(prompts, samples: int, **options) -> list[kvjax.Result]:
    """The same answers, each of a prompt that was read for it alone."""
    sampling = importlib.import_module("kvjax.decoding.fill").Sampling
    found = []
    for prompt in prompts:
        for sample in range(samples):
            with pytest.MonkeyPatch.context() as patch:
                create = sampling.create

                def numbered(rows, *, create=create, sample=sample, **how):
                    return create(rows, **how | {"samples": [sample] * rows})

                patch.setattr(sampling, "create", numbered)
                found += small.decode([prompt], **options)
    return found


@pytest.mark.parametrize(
    "name", ["full", *(pytest.param(n, marks=slow) for n in ("h2o", "pam", "thinkv", "contiguous"))]
)
def test_samples_are_those_of_prompts_read_one_by_one(name):
    """More samples than rows, so that some begin when others have ended."""
    recipe = RECIPES.get(name, recipes.full(PAGE))
    prompts = small.prompts([20, 31, 17] if name == "full" else [60, 41, 33], seed=4)
    options = SAMPLED | {"recipe": recipe, "stop_ids": STOPS[: 3 if name == "full" else 1]}
    if name != "full":
        options |= {"max_new_tokens": 70}
    together = small.decode(prompts, samples=6, **options)
    apart = one_by_one(prompts, 6, **options)
    assert answers(together) == answers(apart)
    assert len({result.tokens for result in together}) == len(together)
    if name == "full":
        first = small.decode(prompts, **options)
        assert answers(together[::6]) == answers(first)
    for left, right in zip(together, apart, strict=True):
        assert left.report["kv"]["live_tokens"] == right.report["kv"]["live_tokens"]


def pages_of(table, row: int = 0) -> list[int]:
    own = np.asarray(table)[row]
    return own[own != SCRATCH_PAGE].tolist()


def accounted(cache, *parked, lent=None) -> None:
    """Every page is free or has one owner; only pages that are lent are named more than once."""
    for index, layer in enumerate(cache.layers):
        tables = zip(layer.tables, layer.free, layer.pools, strict=True)
        for c, (table, free, pool) in enumerate(tables):
            named = pages_of(np.asarray(table)[:, :, lent[index] :].reshape(1, -1))
            for prompt in parked:
                named += pages_of(np.asarray(prompt.cache.layers[index].tables[c]))
            left = np.asarray(free.pages)[: int(free.count)].tolist()
            assert sorted(named + left) == list(range(1, len(pool.pos)))


@pytest.mark.parametrize("name", ["full", pytest.param("h2o", marks=slow)])
def test_whole_pages_of_the_prompt_are_shared_and_no_other(name):
    lm, recipe = small.lm(), RECIPES.get(name, recipes.full(PAGE))
    [prompt] = small.prompts([31])
    size = {"prompt_tokens": 32, "max_new_tokens": NEW, "parameter_bytes": 0, "parks": True}
    planned = plan(lm.config, recipe, batch_size=ROWS, dtype=lm.dtype, **size)
    options = dataclasses.replace(loop_options(), recipe=recipe)
    state = idle_state(init_cache(planned.geometry))
    request = Request(0, tuple(prompt), NEW, False)
    lent = lent_pages(lm, options, len(prompt))
    assert lent == ((1,) * 3 if name == "full" else (0,) * 3)
    state, parked = park_prompt(lm, state, request, options)
    accounted(state.cache, parked, lent=lent)
    for row in (2, 0):
        state, output = continue_prompt(state, row, parked, request, options, lent)
        accounted(state.cache, parked, lent=lent)
        assert output.length.tolist() == [31]
    held = owned(state.cache, 2)
    for layer, of_prompt in zip(state.cache.layers, parked.cache.layers, strict=True):
        for table, source in zip(layer.tables, of_prompt.tables, strict=True):
            mine, its = np.asarray(table)[2], np.asarray(source)[0]
            assert (mine[:, : lent[0]] == its[:, : lent[0]]).all()
            rest = mine[:, lent[0] :], its[:, lent[0] :]
            assert not set(pages_of([rest[0]])) & set(pages_of([rest[1]]))
    for layer, of_prompt in zip(state.cache.layers, parked.cache.layers, strict=True):
        for pool, table, source in zip(layer.pools, layer.tables, of_prompt.tables, strict=True):
            mine, its = table[2], source[0]
            assert (pool.pos[mine] == pool.pos[its]).all() and (pool.k[mine] == pool.k[its]).all()
    state = empty_rows(state, [0], lent)
    accounted(state.cache, parked, lent=lent)
    assert owned(state.cache, 2) == held
    state = empty_rows(state, [2], lent)
    state = drop_prompt(state, parked)
    for layer in state.cache.layers:
        for pool, free in zip(layer.pools, layer.free, strict=True):
            assert int(free.count) == len(pool.pos) - 1


def test_samples_of_greedy_decoding_are_refused():
    with pytest.raises(kvjax.UsageError, match="samples 2 of greedy decoding are all alike"):
        small.decode(small.prompts([20]), samples=2)
    with pytest.raises(kvjax.UsageError, match="samples must be between 1 and"):
        small.decode(small.prompts([20]), samples=0, **SAMPLED)


def test_a_bad_prompt_fails_in_all_its_samples():
    results = small.decode([[], *small.prompts([20])], samples=2, stop_ids=STOPS, **SAMPLED)
    assert [result.finish_reason == "error" for result in results] == [True, True, False, False]
