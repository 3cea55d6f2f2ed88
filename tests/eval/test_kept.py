"""Which tokens of each kind of thought a cache holds."""

import json
import pathlib

import numpy as np
import pytest

from kvjax import recipes
from kvjax.eval.bench_kept import METHODS, counts, cut, figures, held, main, methods, read, told
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
    total = counts(trace, found)
    for kind in range(3):
        mine = trace.kinds == kind
        assert total[0, kind].tolist() == [mine.sum(), here[mine].sum()]
        early = mine & (np.arange(ANSWER) < ANSWER // 2)
        assert total[1, kind].tolist() == [early.sum(), early[: 4 - PROMPT].sum()]
    np.testing.assert_array_equal(total[1] + total[2], total[0])


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


def test_figures_are_shares_of_tokens_over_layers_and_heads():
    rng = np.random.default_rng(2)
    traces = [planted(seed, tokens) for seed, tokens in ((3, 40), (4, 70))]
    masks = [rng.random((2, 3, len(trace.answer))) < 0.4 for trace in traces]
    found = figures(np.array([counts(*one) for one in zip(traces, masks, strict=True)]))
    for k, kind in enumerate(KINDS):
        one = found["all"]["kinds"][kind]
        of_kind = np.concatenate(
            [mask[..., trace.kinds == k] for trace, mask in zip(traces, masks, strict=True)], 2
        )
        assert one["tokens"] == of_kind.shape[2]
        assert one["kept"] == pytest.approx(of_kind.mean())
        chance = np.concatenate(masks, 2).mean()
        assert found["all"]["chance"] == pytest.approx(chance)
        assert one["above"] == pytest.approx(of_kind.mean() / chance - 1)
        low, high = one["interval"]
        assert low <= one["above"] <= high


def test_what_has_no_kind_takes_no_part():
    trace = planted(5, 20)
    trace.kinds[:] = np.repeat([UNKNOWN, 0], 10)
    mask = np.arange(20)[None, None] < 15
    found = figures(counts(trace, mask)[None])
    assert found["all"]["chance"] == 0.5 and list(found["all"]["kinds"]) == ["R"]
    assert found["first half"]["kinds"] == {}


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
    main([*command, "--every", "64", "--methods", "streaming", "thinkv", "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["tokens"] == 129
    for method in found["results"]["reasoner 200"]["methods"].values():
        assert sum(x["tokens"] for x in method["figures"]["all"]["kinds"].values()) == 2 * 129
    assert "streaming, first half: chance" in capsys.readouterr().out
