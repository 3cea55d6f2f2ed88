"""ThinKV on a small model: every slot, every level and every step, against an oracle."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import recipes
from kvjax.cache import reset_rows, slots
from kvjax.command.outline import Outline
from kvjax.compare.phases import Phases
from kvjax.compress import settle as settling
from kvjax.compress.selectors import SnapKV
from kvjax.errors import UsageError
from kvjax.thoughts import Given, Sparsity, demotion, pages
from kvjax.thoughts.state import no_thoughts
from pallas_kernels import write_slots
from tests.decoding import small
from tests.recipes import thinkv

classes = settling._classes
maintaining = importlib.import_module("kvjax.decoding.maintain")
slow = pytest.mark.slow


def test_every_tick_is_as_the_oracle_says():
    oracle = thinkv.follow(small.lm(), thinkv.recipe())
    assert oracle.check_kmeans() > 20
    assert oracle.seen["transition"] and oracle.seen["budget"] and oracle.seen["reused"]


MORE = {
    "evicted tokens are attended": ("llama", {"forget": False}),
    "kinds of the past": ("llama", {"covers": "past"}),
    "at the end": ("llama", {"at": "end", "kinds": "RTTE"}),
    "the first alone": ("llama", {"repeated": False, "itself": True, "kinds": "RTTE"}),
    "a share": ("llama", {"budget": 0.25}),
    "nothing evicted": ("llama", {"budget": None}),
    "one set for all heads": ("llama", {"shared": True}),
    "strided": ("llama", {"chooser": "strided"}),
    "random": ("llama", {"chooser": "random"}),
    "attention": ("llama", {"chooser": "attention", "observed": 8}),
    "layers that keep all": ("llama", {"skip_layers": (0, -1)}),
    "one class for all": ("llama", {"prompt_codec": "int4", "thought_codecs": ("int4",) * 3}),
    "a short window": ("llama", {"window": 4, "tick": 8}),
    "a window off the ticks": ("llama", {"window": 11, "tick": 16}),
    "down to nothing": ("llama", {"schedule": (8, 0), "budget": 20}),
    "longer than a segment": ("llama", {"schedule": (64, 16, 4), "budget": 40}),
    "transitions alone": ("llama", {"kinds": "T", "budget": 20}),
    "a prompt that is selected from": (
        "llama",
        {"selector": SnapKV(window=8), "prompt_budget": 24, "recent": 8},
    ),
    "a key bias": ("qwen2", {}),
    "windows": ("qwen3_window", {}),
    "sinks": ("gpt_oss", {}),
    "the paper": ("qwen3", {"paper": True}),
    "the paper, evicted tokens attended": ("qwen3", {"paper": True, "forget": False}),
    "groups of the past": ("qwen3", {"paper": True, "covers": "past", "budget": 0.2}),
}


@slow
@pytest.mark.parametrize("name", MORE)
def test_every_variant_is_as_the_oracle_says(name):
    model, options = MORE[name]
    oracle = thinkv.follow(small.lm(model), thinkv.recipe(**options))
    evicts = options.get("budget", 1) is not None
    assert bool(oracle.seen["budget"]) == evicts
    assert bool(oracle.seen["ghost"]) == (not options.get("forget", True))
    if evicts and options.get("chooser", "kmeans") == "kmeans" and not options.get("paper"):
        assert oracle.check_kmeans() > 20


def rows(order=(0, 1, 2)) -> thinkv.Run:
    """The rows of the test above in any order; they share its programs."""
    prompts, answers = thinkv.tokens(thinkv.PROMPTS), thinkv.tokens(thinkv.ANSWERS, seed=1)
    return thinkv.Run(
        small.lm(),
        thinkv.recipe(),
        [prompts[i] for i in order],
        [answers[i] for i in order],
        longest=max(thinkv.PROMPTS),
    )


def test_rows_do_not_feel_their_neighbours_and_runs_repeat():
    """In another order, beside other rows: logits, what is held, and thoughts."""

    def all_of(order):
        run, logits = rows(order), []
        while run.done < run.steps:
            run.maintain()
            logits.append(run.step())
        layers = thinkv.read(run.state.cache)
        thoughts = run.state.cache.thoughts
        return {
            i: (
                np.concatenate(logits)[: thinkv.ANSWERS[i], row].tobytes(),
                [np.sort(p[row], None).tolist() for layer in layers for p in layer.pos],
                np.asarray(thoughts.level)[row].tolist(),
                np.asarray(thoughts.kind)[row].tolist(),
            )
            for row, i in enumerate(order)
        }

    together = all_of((0, 1, 2))
    assert all_of((0, 1, 2)) == together
    assert all_of((2, 0, 0)) == {i: together[i] for i in (0, 2)}


@slow
@pytest.mark.parametrize("codec", [None, ("bf16",) * 3])
def test_a_row_is_as_it_is_alone(codec):
    """Thoughts by its own sparsity, and tokens by its own logits."""
    lm = sharp()
    low, high = thresholds(lm)
    recipe = dataclasses.replace(
        thinkv.recipe(thought_codecs=codec),
        segmenter=Sparsity((0, 2), (low, high), every=thinkv.EVERY),
    )
    prompts = small.prompts([40, 21, 9])

    def decode(prompts, **options):
        results = small.decode(
            prompts, lm, recipe=recipe, max_new_tokens=200, repetition_stop=False, **options
        )
        return [
            (result.tokens, result.report["kv"]["thoughts"]["kinds"], result.finish_reason)
            for result in results
        ]

    together = decode(prompts)
    assert len(set("".join(kinds for _, kinds, _ in together))) == 3, together
    assert all(reason == "length" for *_, reason in together)
    assert decode(prompts[::-1]) == together[::-1]
    assert decode(prompts[1:2]) == together[1:2]


@functools.cache
def sharp():
    """Queries so long that attention leaves most tokens out."""

    def sharpen(decoder):
        for layer in decoder.layers:
            weight = layer.attn.qkv[...]
            layer.attn.qkv = nnx.Param(weight.at[:, :-2].multiply(12))

    return small.changed(small.lm(), sharpen)


def thresholds(lm) -> tuple[float, float]:
    """Terciles of what answers measure."""
    recipe = dataclasses.replace(
        thinkv.recipe(), segmenter=Sparsity((0, 2), (0.0, 1.0), every=thinkv.EVERY)
    )
    found = small.decode(
        small.prompts([40, 21, 9]), lm, recipe=recipe, max_new_tokens=200, repetition_stop=False
    )
    shares = [share for result in found for share in result.report["kv"]["thoughts"]["sparsity"]]
    low, high = np.quantile(shares, [1 / 3, 2 / 3])
    return float(low), float(high)


@slow
def test_rows_whose_phase_does_not_compress_keep_all():
    lm = small.lm()
    recipe = thinkv.recipe(compress=("think",), budget=20)
    prompts, answers = thinkv.tokens(thinkv.PROMPTS), thinkv.tokens((176,) * 3, seed=1)
    run = thinkv.Run(lm, recipe, prompts, answers)
    compress = np.array([True, False, True])
    while run.done < run.steps:
        run.maintain(compress)
        run.step()
        compress[2] = run.done < 96
    cache = run.state.cache
    assert not np.asarray(cache.crowded).any()
    level = np.asarray(cache.thoughts.level)
    assert level[0].any() and not level[1].any()
    # The last row was compressed to the budget, and kept everything afterwards.
    held = [sum((p[row] >= 0).sum() for p in thinkv.read(cache)[0].pos) // 2 for row in range(3)]
    assert held[0] <= 20 + 20 + 32 + 32 and held[1] == 9 + 176
    assert held[2] == 33 + 20 + 176 - 64


def test_a_row_that_starts_again_has_no_thoughts():
    run = rows()
    while run.done < 112:
        run.maintain()
        run.step()
    before = run.state.cache
    assert (np.asarray(before.thoughts.kind)[:, 0] == 0).all()
    after = jax.jit(reset_rows)(before, jnp.asarray([False, True, False]))
    empty = no_thoughts(3, before.thoughts.kind.shape[1])
    for name in ("kind", "level", "sparsity", "demoted"):
        new, old, none = (
            np.asarray(getattr(x, name)) for x in (after.thoughts, before.thoughts, empty)
        )
        np.testing.assert_array_equal(new[1], none[1])
        np.testing.assert_array_equal(new[[0, 2]], old[[0, 2]])
    for layer in thinkv.read(after):
        assert all((p[1] < 0).all() and np.isneginf(b[1]).all()
                   for p, b in zip(layer.pos, layer.bias, strict=True))  # fmt: skip


def planned(recipe, answer: int = 640, rows: int = 2):
    return thinkv.planned(small.lm(), recipe, rows, 20, answer)


def test_a_budget_below_the_floor_is_refused_with_the_number_that_would_do():
    # 641 tokens at most: 20 segments, of which 2 tokens stay each.
    with pytest.raises(UsageError, match=r"budget 39 is below the 2 tokens .* 20 segments .* 40"):
        planned(thinkv.recipe(budget=39))
    assert planned(thinkv.recipe(budget=40)).geometry.segments == 21
    planned(thinkv.recipe(budget=1, schedule=(4, 0)))
    # A schedule beyond a segment is a segment.
    with pytest.raises(UsageError, match="pass 640"):
        planned(thinkv.recipe(budget=639, schedule=(64,)))
    planned(thinkv.recipe(budget=640, schedule=(64,)))


def test_a_budget_has_to_do_for_what_the_context_leaves_room_for():
    """Behind the shortest prompt: 640 tokens, 20 segments. However many more are asked for."""
    lm, many = small.lm(context=660), 10**5
    low, enough = thinkv.recipe(budget=39), thinkv.recipe(budget=40)
    refused = pytest.raises(UsageError, match=r"39 is below .* 2 tokens .* 20 segments .* pass 40")
    with refused:
        thinkv.planned(lm, low, 2, 20, many)
    assert thinkv.planned(lm, enough, 2, 20, many).geometry.segments == 21
    thinkv.planned(lm, low, 2, 340, many)  # 10 segments
    with refused:
        kvjax.generate(lm, [[1] * 340, [2] * 20], recipe=low, max_new_tokens=many)
    request = {"config": lm.config, "batch_size": 2, "prompt_tokens": 340, "max_new_tokens": many}
    outlined = Outline(request | {"dtype": lm.dtype, "parameter_bytes": 0}, [340, 20])
    assert outlined.least_budget(low) == 40
    with refused:
        outlined.plan(low)
    outlined.plan(enough)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"budget": 100}, 100 + 32 + 16),
        ({"budget": 0.5}, 0.5 * 640 + 32 + 16),
        ({"budget": 0.01}, 2 * 20 + 32 + 16),  # the floor
        ({"budget": 100, "compress": ("think",)}, 640),
        ({"budget": None}, 640),
    ],
)
def test_pools_have_room_for_what_can_stay(options, tokens):
    for layer in planned(thinkv.recipe(**options)).geometry.layers:
        assert [part.codec.name for part in layer.classes] == ["bf16", "int8", "int4", "int2"]
        for part in layer.classes[2:]:
            assert tokens <= part.capacity <= tokens + 64 + 16
        assert layer.classes[1].capacity >= 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 48}, r"segment_tokens 48 .* multiple of the 32 tokens .* kivi2"),
        ({"thought_codecs": ("int4", "kivi2", "int4"), "every": 48}, "segment_tokens 48"),
        ({"layer_codecs": ((0, "nvfp4"),)}, "layer_codecs nvfp4 shares scales"),
        ({"prompt_codec": None, "codec": "nvfp4"}, "codec nvfp4 shares scales"),
        ({"codec": "kivi2"}, "codec kivi2 shares scales"),
        ({"prompt_codec": "kivi2"}, "prompt_codec kivi2 shares scales"),
        ({"selector": SnapKV()}, "prompt_budget and a selector"),
        ({"prompt_budget": 100}, "prompt_budget and a selector"),
        ({"selector": SnapKV(), "prompt_budget": 20}, "prompt_budget 20 is below"),
        ({"budget": 0}, "budget must be"),
        ({"budget": 1.5}, "budget must be"),
        ({"budget": True}, "budget must be"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_made(options, message):
    options = {"every": 32, "thought_codecs": ("kivi2",) * 3} | options
    segmenter = Given(every=options.pop("every"))
    with pytest.raises(UsageError, match=message):
        recipes.thinkv(segmenter=segmenter, **options)


def test_a_prompt_can_be_selected_from_beside_grouped_thoughts():
    recipe = recipes.thinkv(paper=True, selector=SnapKV(), prompt_budget=64)
    assert recipe.thought_codecs == ("nvfp4",) * 3


def test_layers_that_sparsity_is_measured_in_keep_a_query_and_have_no_window():
    told = Sparsity((1,), (0.1, 0.5))
    geometry = planned(recipes.thinkv(segmenter=told), 100).geometry
    assert [layer.queries for layer in geometry.layers] == [0, 1, 0]
    assert all(type(layer.queries) is int for layer in geometry.layers)
    with pytest.raises(UsageError, match="names layer 0, whose sliding window"):
        windowed = recipes.thinkv(segmenter=Sparsity((0,), (0.1, 0.5)))
        thinkv.planned(small.lm("qwen3_window"), windowed, 1, 20, 100)
    with pytest.raises(UsageError, match="names layer 3, and the model has 3"):
        planned(recipes.thinkv(segmenter=Sparsity((3,), (0.1, 0.5))), 100)


@slow
def test_answers_far_longer_than_a_budget():
    """Twenty segments; a share below the floor ends at the floor, and nothing is crowded."""
    for budget in (0.01, 40):
        oracle = thinkv.follow(
            small.lm(), thinkv.recipe(budget=budget), prompts=(20, 9), answers=(640, 640)
        )
        assert oracle.closed == [19, 19]
        assert sum(map(oracle.machines[0].size, range(19))) == (2 * 19 if budget < 1 else 40)


# Mutants: each must be caught by the run above.


def demoted_twice(monkeypatch):
    def mutant(thoughts, *rest):
        new = demotion.refresh(thoughts, *rest)
        level = new.level + (new.level - thoughts.level)
        return dataclasses.replace(new, level=jnp.minimum(level, len(thinkv.SCHEDULE)))

    monkeypatch.setattr(maintaining, "refresh", mutant)


def labels_late(monkeypatch):
    def mutant(thoughts, segmenter, *rest):
        late = "".join(segmenter.kinds[i - 1] for i in range(len(segmenter.kinds)))
        return demotion.refresh(thoughts, dataclasses.replace(segmenter, kinds=late), *rest)

    monkeypatch.setattr(maintaining, "refresh", mutant)


def levels_stay_with_slots(monkeypatch):
    """A token takes over how many demotions the last one of its slot survived."""

    def mutant(pool, *rest, **more):
        return dataclasses.replace(write_slots(pool, *rest, **more), level=pool.level)

    monkeypatch.setattr(slots, "write_slots", mutant)


def one_level_further(monkeypatch):
    """A token that survives as many demotions as there were is evicted."""

    def mutant(layer, thoughts, *rest):
        further = dataclasses.replace(
            thoughts, level=thoughts.level + (thoughts.level > 0).astype(jnp.int32)
        )
        return pages.retire(layer, further, *rest)

    monkeypatch.setattr(maintaining, "retire", mutant)


def evicted_by_nobody(monkeypatch):
    monkeypatch.setattr(maintaining, "retire", lambda layer, *_: layer)


def classes_by_the_segment_before(monkeypatch):
    def mutant(policy, pos, prompt, recipe, thoughts):
        later = pos >= prompt[:, None] + thinkv.EVERY
        pos = jnp.where(later, pos - thinkv.EVERY, pos)
        return classes(policy, pos, prompt, recipe, thoughts)

    monkeypatch.setattr(settling, "_classes", mutant)


@slow
@pytest.mark.parametrize(
    "mutant",
    [
        demoted_twice,
        labels_late,
        levels_stay_with_slots,
        one_level_further,
        evicted_by_nobody,
        classes_by_the_segment_before,
    ],
)
def test_a_mutant_is_caught(monkeypatch, mutant):
    programs = [getattr(maintaining, name) for name in ("_refresh", "_rows", "_settle")]
    mutant(monkeypatch)
    try:
        for program in programs:
            program.clear_cache()
        with pytest.raises(AssertionError):
            thinkv.follow(small.lm(), thinkv.recipe(), every_tick=False)
    finally:
        for program in programs:
            program.clear_cache()


def test_a_comparison_follows_the_phases_that_a_recipe_names():
    """A model without thinking marks has an answer alone."""
    ids = np.zeros((2, 60), np.int64)
    for compress, evicts in ((("think",), False), (("answer",), True), (("prompt",), False)):
        phases = Phases(small.lm(), ids, 20, thinkv.recipe(compress=compress))
        assert phases.after(32).tolist() == [evicts] * 2
