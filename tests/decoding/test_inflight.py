"""Rows that end make room for others, which nobody notices but the clock."""

import collections
import dataclasses
import functools
import gc
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import recipes
from kvjax.cache import init_cache, plan
from kvjax.cache.fitting import pages_of_row
from kvjax.decoding import decode_chunk
from kvjax.decoding.chunk import idle_state
from kvjax.decoding.fill import empty_rows, fill_rows
from kvjax.decoding.requests import Request
from pallas_kernels import SCRATCH_PAGE
from tests.decoding import small
from tests.decoding.small import CHUNK, NEW, PAGE, ROWS, SAMPLED
from tests.recipes import thinkv
from tests.recipes.test_budget import made

slow = pytest.mark.slow
loop = importlib.import_module("kvjax.decoding.loop")
STOPS = (3, 50, 77)
"""Let some answers end early, and at different times."""


def alone(prompts, **options) -> list[kvjax.Result]:
    """Each in a run of its own."""
    return [small.decode([prompt], **options)[0] for prompt in prompts]


def answers(results) -> list[tuple]:
    return [(result.tokens, result.finish_reason) for result in results]


def mixed(count: int = 10) -> list[list[int]]:
    """Prompts of one bucket."""
    return small.prompts([20, 31, 17, 25, 32, 18, 29, 22, 19, 30][:count], seed=4)


@pytest.mark.parametrize(
    "how", [{}, pytest.param({"seed": 1} | SAMPLED, marks=slow)], ids=["greedy", "sampled"]
)
def test_answers_are_those_alone(how):
    how = how | {"stop_ids": STOPS}
    together = small.decode(mixed(), **how)
    assert len({len(result.tokens) for result in together}) > 3
    assert answers(together) == answers(alone(mixed(), **how))


RECIPES = {
    "uniform": recipes.uniform("int4", page_size=16),
    "kivi": recipes.kivi("kivi2-g8"),
    "streaming": made("streaming", budget=40, every=32),
    "contiguous": made("streaming", budget=40, codec="int4", positions="contiguous"),
    "random": made("random", budget=40, codec="k4v2"),
    "h2o": made("h2o", budget=40, codec="int4"),
    "a share": made("h2o", budget=0.5, codec="int8"),
    "tova": made("tova", budget=40, codec="int8"),
    "snapkv": made("snapkv", budget=40, codec="int4"),
    "snapkv_decode": made("snapkv_decode", budget=40, codec="int4", every=32),
    "rkv": made("rkv", budget=40, codec="int4", every=32),
    "pam": made("pam", budget=40, codec="int8", every=32),
    "once": made("pam", budget=40, codec="int8", every=32, once=True),
    "tam": recipes.tam(budget=40, every=32, page_size=16, recent=16),
    "thinkv": thinkv.recipe(budget=40),
    "thinkv past": thinkv.recipe(budget=40, covers="past"),
    "thinkv matching": thinkv.recipe(budget=40, compactor=kvjax.matching.AttentionMatching(16)),
}
QUICK = ("streaming",)
SEEDS = {"snapkv_decode": 7}
"""Of prompts, 5 but here: with it one selection differs by a token, in a batch of three, whose
queries differ by 1e-5 from those alone."""


@pytest.mark.parametrize(
    "how", [pytest.param({}, marks=slow), {"seed": 3} | SAMPLED], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else slow) for n in RECIPES]
)
def test_answers_are_those_alone_with_every_recipe(name, how, text_lm):
    """Work on the cache is counted from a row's own first token, whenever that was."""
    if how and name in QUICK:
        pytest.skip("it is the selection that is looked at")
    recipe = RECIPES[name]
    new = 112 if recipe.segmenter else 64
    common = {"recipe": recipe, "max_new_tokens": new, "batch_size": 3, "repetition_stop": False}
    prompts = small.prompts([40, 63, 33, 57, 48, 50], seed=SEEDS.get(name, 5))
    how = how | common | {"stop_ids": STOPS[:1]}
    how |= {"model": text_lm if recipe.needs_text else small.lm()}
    together = small.decode(prompts, **how)
    if name in QUICK:  # where nobody waits: as alone, by other tests
        apart = [result for at in (0, 3) for result in small.decode(prompts[at : at + 3], **how)]
    else:
        apart = alone(prompts, **how)
    assert answers(together) == answers(apart)
    for left, right in zip(together, apart, strict=True):
        for figure in ("live_tokens", "evictions", "crowded", "slots_reused", "logical_tokens"):
            assert left.report["kv"][figure] == right.report["kv"][figure]
        assert left.report["kv"].get("thoughts") == right.report["kv"].get("thoughts")
        assert left.history.bytes.tolist() == right.history.bytes.tolist()
    assert len({len(result.tokens) for result in together}) > 2
    if recipe.selector or recipe.retention:
        assert any(result.report["kv"]["evictions"] for result in together)


def accounted(cache) -> None:
    """Every page is free or owned, once."""
    for layer in cache.layers:
        for pool, table, free in zip(layer.pools, layer.tables, layer.free, strict=True):
            owned = np.asarray(table)[np.asarray(table) != SCRATCH_PAGE].tolist()
            left = np.asarray(free.pages)[: int(free.count)].tolist()
            assert sorted(owned + left) == list(range(1, len(pool.pos)))


@pytest.fixture
def watched(monkeypatch) -> list:
    """Free pages of every class before every chunk; each page is accounted for."""
    seen = []
    whole = loop.decode_chunk

    def look(model, state, *args, **options):
        accounted(state.cache)
        seen.append([int(f.count) for layer in state.cache.layers for f in layer.free])
        return whole(model, state, *args, **options)

    monkeypatch.setattr(loop, "decode_chunk", look)
    return seen


@pytest.mark.parametrize(
    "recipe",
    [recipes.full(PAGE), pytest.param(RECIPES["rkv"], marks=slow)],
    ids=["full", "rkv"],
)
def test_no_page_is_lost_and_nothing_is_compiled_anew(watched, recipe):
    """A short soak; the long one is below."""
    soak(watched, recipe, 24)


@slow
@pytest.mark.parametrize("name", ["full", "h2o"])
def test_a_soak(watched, name):
    """2,000 requests of mixed lengths."""
    recipe = recipes.full(PAGE) if name == "full" else made("h2o", budget=40, codec="int4")
    soak(watched, recipe, 2000)


def soak(watched, recipe, count: int) -> None:
    rng = np.random.default_rng(0)
    prompts = small.prompts(rng.integers(1, 33, count).tolist(), seed=6)
    options = SAMPLED | {"recipe": recipe, "max_new_tokens": NEW, "stop_ids": STOPS}
    small.decode(small.prompts([16, 32, *[32, 15] * 6]), **options)
    # Sooner or later all rows end together, and prompts of either bucket are read together.
    small.decode(small.prompts([16] * ROWS + [32] * ROWS), **options | {"stop_ids": ()})
    watched.clear()
    gc.collect()  # what earlier tests have left
    with small.counting_compilations() as compiled:
        events = kvjax.stream(small.lm(), prompts, batch_size=ROWS, chunk=CHUNK, **options)
        done, arrays = {}, []
        for event in events:
            if event.kind == "done":
                done[event.row] = event.result
                if len(done) % 100 == 0:
                    arrays.append(sum(array.nbytes for array in jax.live_arrays()))
    assert compiled == []
    assert sorted(done) == list(range(count))
    assert {result.finish_reason for result in done.values()} == {"stop", "length"}
    assert not arrays or max(arrays) < 1.02 * min(arrays)
    assert min(map(min, watched)) < max(map(max, watched))
    some = range(0, count, count // 12)
    assert answers(map(done.get, some)) == answers(alone([prompts[i] for i in some], **options))


def filled(lm, recipe, prompts, rows, planned, state):
    options = dataclasses.replace(loop_options(), recipe=recipe)
    requests = [Request(i, tuple(prompt), NEW, False) for i, prompt in enumerate(prompts)]
    return fill_rows(lm, state, rows, requests, options)


@functools.cache
def loop_options():
    """The options of a run, as its loop gets them."""
    taken = []
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("kvjax.decoding.generate")
        patch.setattr(module, "decode_all", lambda *args, **_: taken.append(args[3]) or ())
        list(kvjax.stream(small.lm(), [[1]], stop_ids=()))
    return taken[0]


def owned(cache, row: int) -> bytes:
    """Everything that a row holds, and where."""
    parts = [np.asarray(cache.length[row]).tobytes()]
    for layer in cache.layers:
        for pool, table in zip(layer.pools, layer.tables, strict=True):
            own = np.asarray(table)[row]
            parts.append(own.tobytes())
            pages = own[own != SCRATCH_PAGE]
            parts += [
                np.asarray(leaf)[pages].tobytes()
                for leaf in jax.tree.leaves(pool)
                if leaf.shape[0] == pool.pos.shape[0]
            ]
        if layer.queries is not None:
            parts.append(np.asarray(layer.queries[row]).tobytes())
    return b"".join(parts)


@pytest.mark.parametrize("name", ["full", pytest.param("h2o", marks=slow)])
def test_emptying_and_filling_a_row_touches_no_other(name):
    """What the row has left, NaN or not, is gone from its pages, whoever gets them."""
    lm = small.lm()
    recipe = recipes.full(PAGE) if name == "full" else RECIPES[name]
    prompts = small.prompts(small.LENGTHS)
    size = {"prompt_tokens": 32, "max_new_tokens": NEW, "parameter_bytes": 0}
    planned = plan(lm.config, recipe, batch_size=ROWS, dtype=lm.dtype, **size)
    state = idle_state(init_cache(planned.geometry))
    state, _ = filled(lm, recipe, prompts, range(ROWS), planned, state)
    state = poisoned(state, 1)
    before = [owned(state.cache, row) for row in range(ROWS)]
    state = empty_rows(state, [1])
    accounted(state.cache)
    for layer in state.cache.layers:
        for pool in layer.pools:
            assert all(np.isfinite(leaf).all() for leaf in (pool.k, pool.v))
    assert (np.asarray(state.cache.length) == 0).tolist() == [False, True, False, False]
    state, output = filled(lm, recipe, prompts[3:], [1], planned, state)
    after = [owned(state.cache, row) for row in range(ROWS)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True, True]
    assert int(output.length[0]) == len(prompts[3])
    accounted(state.cache)
    state = empty_rows(state, range(ROWS))
    for layer in state.cache.layers:
        for pool, free in zip(layer.pools, layer.free, strict=True):
            assert int(free.count) == len(pool.pos) - 1
            assert np.isneginf(pool.bias).all() and (np.asarray(pool.pos) == -1).all()


def poisoned(state, row: int):
    """NaN in all that a row has written."""
    layers = []
    for layer in state.cache.layers:
        pool, pages = layer.pools[0], layer.tables[0][row]
        pages = jnp.where(pages == SCRATCH_PAGE, len(pool.pos), pages)
        k, v = (a.at[pages].set(jnp.nan, mode="drop") for a in (pool.k, pool.v))
        pool = dataclasses.replace(pool, k=k, v=v)
        layers.append(dataclasses.replace(layer, pools=(pool, *layer.pools[1:])))
    cache = dataclasses.replace(state.cache, layers=tuple(layers))
    return dataclasses.replace(state, cache=cache)


def test_a_row_that_is_lost_harms_nobody_who_comes_after_it():
    """Its first token is a NaN's, in a run whose rows are used again and again."""
    bad = small.changed(
        small.lm(), lambda model: setattr(model, "embed", _with_nan(model.embed, 95))
    )
    prompts = [[*prompt[:-1], 95] if i % 3 == 0 else prompt for i, prompt in enumerate(mixed())]
    usual = small.tokens(mixed())
    assert not any(95 in row for row in usual)
    results = small.decode(prompts, bad)
    for i, result in enumerate(results):
        assert result.finish_reason == ("length" if i % 3 else "error")
        assert i % 3 == 0 or result.tokens == usual[i]


def _with_nan(embed, token: int):
    return type(embed)(embed[...].at[token].set(jnp.nan))


def memory_for(longest: float, rows: int = ROWS, prompt: int = 32) -> int:
    """Bytes for the weights, the tables of all rows and the pages of so many of the longest."""
    lm = small.lm()
    planned = plan(
        lm.config,
        recipes.full(PAGE),
        batch_size=rows,
        prompt_tokens=prompt,
        max_new_tokens=NEW,
        dtype=lm.dtype,
        parameter_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(lm.model)),
    )
    one, two = (
        dataclasses.replace(planned, geometry=dataclasses.replace(planned.geometry, longest=n))
        for n in (1, 2)
    )
    return round(one.nbytes + (longest - 1) * (two.nbytes - one.nbytes))


def test_who_does_not_fit_yet_waits(watched):
    """Pages for two of the longest: short ones find room for more, and nobody's answer changes."""
    prompts = small.prompts([31, 12, 32, 9, 10, 11, 28, 7], seed=7)
    events = kvjax.stream(
        small.lm(),
        prompts,
        recipe=recipes.full(PAGE),
        max_new_tokens=NEW,
        batch_size=ROWS,
        chunk=CHUNK,
        memory_bytes=memory_for(2),
    )
    begun, running, most = [], set(), collections.Counter()
    results = {}
    for event in events:
        if event.kind == "text" and event.row not in begun:
            begun.append(event.row)
            running.add(event.row)
            most[len(running)] += 1
        if event.kind == "done":
            running.discard(event.row)
            results[event.row] = event.result
    assert begun == sorted(begun), "in the order of the file"
    assert 2 < max(most) <= ROWS
    free = max(map(max, watched))
    assert answers(results[i] for i in range(8)) == answers(small.decode(prompts))
    pool = results[0].report["kv"]["bytes"]["pool_allocated"]
    assert pool < memory_for(2)
    # 4 pages of 16 hold 32 + 20 tokens; there are as many again, for each of 2 heads.
    assert free <= 2 * 2 * 4


def test_who_can_never_fit_is_refused_with_the_numbers():
    prompts = small.prompts([20, 900, 25], seed=8)
    results = small.decode(prompts, memory_bytes=memory_for(2))
    assert [result.finish_reason for result in results] == ["length", "error", "length"]
    assert answers(results[::2]) == answers(small.decode(prompts[::2] * 2)[:2])
    assert results[1].error.startswith("1 row of 1044 tokens need")
    assert "there are " in results[1].error and results[1].prompt_tokens == 900
    with pytest.raises(kvjax.CapacityError, match="1 row of 1044 tokens"):
        small.decode(prompts[1:2], memory_bytes=memory_for(2))


@pytest.mark.parametrize("name", ["full", *RECIPES])
@pytest.mark.parametrize("context", [1 << 14, 170], ids=["long", "short"])
def test_no_request_can_own_more_than_the_largest(name, context):
    """Where the context ends, answers of short prompts get longer than the longest prompt's."""
    config = small.lm(context=context).config
    recipe = RECIPES.get(name, recipes.full(PAGE))
    size = {"dtype": "float32", "parameter_bytes": 0, "batch_size": 1}
    planned = plan(config, recipe, prompt_tokens=100, max_new_tokens=90, **size)
    shapes = [shape for layer in planned.geometry.layers for shape in layer.classes]
    largest = [shape.of_row(config.num_kv_heads) for shape in shapes]
    before = None
    for prompt, new in ((1, 0), (1, 1), (5, 40), (5, 90), (33, 90), (66, 90), (80, 90), (100, 70)):
        pages = pages_of_row(config, planned, prompt, new)
        assert (pages <= largest).all() and (pages > 0).all()
        assert new == 70 or before is None or (pages >= before).all()
        before = pages


def test_results_come_as_they_finish():
    """Who waited begins before all that began first have ended, and order is kept for nobody."""
    options = {"max_new_tokens": NEW, "batch_size": ROWS, "chunk": CHUNK, "stop_ids": STOPS}
    seen = [
        (event.kind, event.row)
        for event in kvjax.stream(
            small.lm(), mixed(), recipe=recipes.full(PAGE), **options, seed=1, **SAMPLED
        )
        if event.kind != "phase"
    ]
    ends = [row for kind, row in seen if kind == "done"]
    assert sorted(ends) == list(range(10)) and ends != sorted(ends)
    first = [seen.index(("text", row)) for row in range(10)]
    assert first == sorted(first), "they begin in order"
    assert first[ROWS] < max(seen.index(("done", row)) for row in range(ROWS))


@pytest.mark.parametrize("after", [3, 4, 6])
def test_an_interrupt_keeps_what_has_finished(after):
    """Some have finished, some are running, some have not begun."""
    polls = []
    results = small.decode(
        mixed(),
        should_stop=lambda: polls.append(None) or len(polls) > after,
    )
    usual = small.tokens(mixed())
    reasons = [result.finish_reason for result in results]
    assert reasons == ["length"] * reasons.count("length") + ["interrupted"] * (
        10 - reasons.count("length")
    )
    assert reasons.count("length") == {3: 0, 4: 4, 6: 4}[after] and not results[9].tokens
    for result, row in zip(results, usual, strict=True):
        assert result.tokens == row[: len(result.tokens)]
        assert bool(result.report) == bool(result.tokens)


def test_times_are_a_request_s_own():
    results = small.decode(small.prompts([20] * 9, seed=4))
    waits = [result.report["timing"]["wait_s"] for result in results]
    assert waits == sorted(waits) and waits[0] < waits[4] < waits[8]
    for result in results:
        timing = result.report["timing"]
        assert 0 < timing["prefill_s"] <= timing["ttft_s"]
        assert timing["decode_tok_s"] == pytest.approx((NEW - 1) / timing["decode_s"])


def test_a_chunk_after_a_row_was_filled_leaves_the_rest_to_it():
    """A state that was put together of rows filled one by one decodes as one filled at once."""
    lm, recipe = small.lm(), recipes.full(PAGE)
    prompts = small.prompts(small.LENGTHS)
    size = {"prompt_tokens": 32, "max_new_tokens": NEW, "parameter_bytes": 0}
    planned = plan(lm.config, recipe, batch_size=ROWS, dtype=lm.dtype, **size)
    state = idle_state(init_cache(planned.geometry))
    for row in (2, 0, 3, 1):
        state, _ = filled(lm, recipe, [prompts[row]], [row], planned, state)
    halt = np.zeros(ROWS, bool)
    options = {"steps": CHUNK, "stop_ids": (), "width": loop.NARROWEST, "recipe": recipe}
    _, output = decode_chunk(lm.model, state, None, halt, **options)
    for row, usual in enumerate(small.usual()):
        assert tuple(np.asarray(output.tokens)[:, row].tolist()) == usual[1 : 1 + CHUNK]
