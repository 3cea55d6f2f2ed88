"""Which tokens of each kind of thought a cache holds."""

import json
import pathlib

import numpy as np
import pytest

from kvjax import recipes
from kvjax.eval.bench_kept import (
    METHODS,
    counts,
    cut,
    described,
    figures,
    held,
    main,
    methods,
    read,
    same_age,
    told,
)
from kvjax.eval.traces import UNKNOWN, Trace
from kvjax.thoughts import KINDS, Given, Retention
from tests.decoding import small

MODEL = pathlib.Path(__file__).parents[2] / "eval" / "models" / "reasoner"
PROMPT, ANSWER = 2, 81  # five ticks, and one more


def planted(seed: int = 0, tokens: int = ANSWER) -> Trace:
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 3, tokens)
    ids = rng.integers(0, 95, PROMPT + tokens).tolist()
    return Trace(str(seed), ids[:PROMPT], ids[PROMPT:], kinds, np.arange(tokens))


def test_streaming_holds_the_first_four_and_the_last_of_each_kind():
    """After the selection one more token was read: it comes on top of the budget."""
    trace, budget = planted(), 28
    found = read(small.lm("qwen3"), trace, recipes.streaming(budget=budget, recent=8))
    here = np.zeros(ANSWER, bool)
    here[: 4 - PROMPT] = here[-(budget - 4 + 1) :] = True
    assert found.shape[2] == ANSWER and (found == here).all()
    total, _ = counts(np.stack([trace.kinds] * 2), np.stack([found.mean((0, 1))] * 2))
    for kind in range(3):
        mine = trace.kinds == kind
        assert total[0, kind, :2].tolist() == [mine.sum(), here[mine].sum()]
        early = mine & (np.arange(ANSWER) < ANSWER // 2)
        assert total[1, kind, :2].tolist() == [early.sum(), early[: 4 - PROMPT].sum()]
    np.testing.assert_array_equal((total[1] + total[2])[:, :2], total[0, :, :2])


def test_every_class_and_head_is_counted_and_free_slots_are_not():
    packed = {
        "0.0.pages": np.array([1, 1]),
        "0.0.pos": np.array([[4, 5], [4, -1]]),
        "0.1.pages": np.array([0, 2]),
        "0.1.pos": np.array([[0, -1], [-1, 3]]),
        "1.0.pages": np.array([1, 0]),
        "1.0.pos": np.array([[2, 1]]),
    }
    found = [[np.flatnonzero(head).tolist() for head in layer] for layer in held(packed, 2, 6)]
    assert found == [[[4, 5], [0, 3, 4]], [[1, 2], []]]


@pytest.mark.slow
def test_thinkv_holds_what_its_schedule_leaves():
    """A transition begins at the third segment of 32 tokens, and those before it are demoted."""
    retention, given = Retention((16, 8)), Given("RET", every=32)
    recipe = recipes.thinkv(80, segmenter=given, retention=retention, page_size=16)
    found = read(small.lm("qwen3"), planted(1, 129), recipe)
    sizes = np.add.reduceat(found.astype(int), range(0, 129, 32), axis=2)
    assert (sizes == [16, 16, 32, 32, 1]).all()
    assert not (found == found[:1, :1]).all()  # each head chooses its own


def test_figures_are_shares_of_tokens():
    rng = np.random.default_rng(2)
    kinds, shares = rng.integers(0, 3, (4, 60)), rng.random((4, 60))
    found = figures(counts(kinds, shares))
    for name, part in (
        ("all", slice(None)),
        ("first half", slice(30)),
        ("second half", slice(30, 60)),
    ):
        for k, kind in enumerate(KINDS):
            one, mine = found[name]["kinds"][kind], kinds[:, part] == k
            kept, chance = shares[:, part][mine].mean(), shares[:, part].mean()
            assert one["tokens"] == mine.sum() and one["kept"] == pytest.approx(kept)
            assert found[name]["chance"] == pytest.approx(chance)
            above, low, high = one["above_chance"]
            assert above == pytest.approx(kept / chance - 1) and low <= above <= high


def test_what_depends_on_age_alone_is_not_above_that_of_the_same_age():
    """Kinds that come late are kept more than by chance; a kind that is liked, more than both."""
    rng = np.random.default_rng(3)
    kinds = np.sort(rng.integers(0, 3, (20, 300)), 1)  # R before E before T
    late = np.arange(300) / 300 * np.ones((20, 1))
    by_age = figures(counts(kinds, late))["all"]["kinds"]
    assert by_age["T"]["above_chance"][0] > 0.5
    for one in by_age.values():
        assert abs(one["above_age"][0]) < 0.02
    kinds = rng.integers(0, 3, (20, 300))
    liked = figures(counts(kinds, late * np.where(kinds == 1, 1.0, 0.5)))["all"]["kinds"]
    assert liked["E"]["above_age"][0] == pytest.approx(0.5, abs=0.05)
    assert liked["R"]["above_age"][0] == pytest.approx(-0.25, abs=0.05)


def test_age_is_that_of_the_other_traces():
    shares = np.zeros((3, 90))
    shares[0, 45] = 1
    found = same_age(shares)
    assert found[0].max() == 0
    np.testing.assert_allclose(found[1], np.where(abs(np.arange(90) - 45) <= 16, 1 / 33 / 2, 0))


def test_what_has_no_kind_takes_no_part():
    kinds = np.repeat([UNKNOWN, 0], 10) * np.ones((2, 1), int)
    found = figures(counts(kinds, (np.arange(20) < 15) * np.ones((2, 1))))
    assert found["all"]["chance"] == 0.5 and list(found["all"]["kinds"]) == ["R"]
    assert found["first half"]["kinds"] == {}


def test_where_nothing_is_held_there_is_nothing_to_be_above():
    kinds = np.tile([0, 1], (2, 10))
    found = figures(counts(kinds, (np.arange(20) >= 10) * np.ones((2, 1))))["first half"]
    assert found["chance"] == 0 and found["kinds"]["R"]["kept"] == 0
    assert found["kinds"]["R"]["above_chance"] is None
    assert described(found).startswith("chance 0.000; R 0.000")


def test_thinkv_is_told_each_segments_most_frequent_kind():
    trace = planted(6, 128 * 3 + 1)
    trace.kinds[:] = np.repeat([0, 2, 1, 0], [70, 90, 224, 1])
    trace.kinds[200:384] = UNKNOWN
    trace.kinds[256] = 2
    assert told(trace) == "RETR"
    assert cut(trace, 128).kinds.tolist() == trace.kinds[:128].tolist()
    assert told(cut(trace, 128)) == "R"


def test_all_methods_hold_the_prompt_and_the_same_budget():
    found = dict(methods(planted(7, 257), 128, 64, 30))
    assert tuple(found) == METHODS
    for name, recipe in found.items():
        assert recipe.spares_prompt
        assert recipe.budget == (64 if name.startswith("thinkv") else 94)
    assert {found[name].every for name in ("tam", "pam", "rkv")} == {128}


@pytest.mark.slow
def test_the_command_measures_the_reasoner(tmp_path, capsys):
    out = tmp_path / "kept.json"
    command = ["--model", str(MODEL), "--levels", "200", "--problems", "2", "--tokens", "128"]
    main(
        [
            *command,
            "--share",
            "0.5",
            "--every",
            "64",
            "--methods",
            "streaming",
            "thinkv",
            "--out",
            str(out),
        ]
    )
    found = json.loads(out.read_text())
    assert found["tokens"] == 129
    for method in found["results"]["reasoner 200"]["methods"].values():
        assert sum(x["tokens"] for x in method["all"]["kinds"].values()) == 2 * 129
    assert "streaming, first half: chance" in capsys.readouterr().out
