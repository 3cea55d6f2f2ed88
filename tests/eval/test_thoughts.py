"""Whether kinds of thought and their borders are found where they are known."""

import itertools
import json
import pathlib

import numpy as np
import pytest

import kvjax
from kvjax.errors import UsageError
from kvjax.eval.bench_thoughts import (
    AROUND,
    above,
    attention_of,
    borders_found,
    by_lot,
    kinds_found,
    local,
    main,
    matched,
    peaks,
    steps,
    unit_means,
)
from kvjax.eval.traces import UNKNOWN, Trace, of_file, of_reasoner
from kvjax.thoughts import KINDS
from kvjax.train.reasoner import vocabulary

MODEL = pathlib.Path(__file__).parents[2] / "eval" / "models" / "reasoner"


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture(scope="module")
def lm():
    return kvjax.load(MODEL)


def planted(rng, count=6, units=12) -> list[Trace]:
    """Traces of units of 20 to 40 tokens, each of another kind than the one before."""
    traces = []
    for index in range(count):
        kinds = [int(rng.integers(3))]
        while len(kinds) < units:
            kinds.append((kinds[-1] + int(rng.integers(1, 3))) % 3)
        lengths = rng.integers(20, 41, units)
        numbers = np.repeat(np.arange(units), lengths)
        traces.append(
            Trace(str(index), [1], [2] * int(lengths.sum()), np.array(kinds)[numbers], numbers)
        )
    return traces


def test_above_counts_ties_half(rng):
    first, second = rng.integers(0, 5, 7).astype(float), rng.integers(0, 5, 11).astype(float)
    pairs = [(a > b) + 0.5 * (a == b) for a, b in itertools.product(first, second)]
    assert above(first, second) == pytest.approx(np.mean(pairs))
    assert np.isnan(above(first, second[:0]))


def test_units_have_the_means_of_their_tokens(rng):
    [trace] = planted(rng, 1)
    values = rng.random((3, len(trace.answer)))
    means, kinds = unit_means(trace, values)
    for number in range(12):
        mine = trace.units == number
        np.testing.assert_allclose(means[:, number], values[:, mine].mean(1))
        assert kinds[number] == trace.kinds[mine][0]


def test_a_step_is_the_difference_of_means(rng):
    values = rng.random(50)
    found = steps(values, 4)
    assert found[0] == 0
    for at in (1, 3, 4, 20, 47, 49):
        left, right = values[max(at - 4, 0) : at], values[at : at + 4]
        assert found[at] == pytest.approx(abs(right.mean() - left.mean()))


def test_local_is_the_contrast_with_the_tokens_around():
    rising = np.linspace(0, 9, 3 * AROUND)[None]
    inside = slice(AROUND, -AROUND)
    assert np.abs(local(rising)[:, inside]).max() < 0.01
    bump = np.zeros((1, 3 * AROUND))
    bump[:, AROUND + 40 : AROUND + 60] = 1
    assert local(bump)[0, AROUND + 50] == pytest.approx(1 - 20 / AROUND)


def test_peaks_keep_their_distance():
    values = np.array([0, 5, 4, 0, 0, 3, 0, 0, 2.0])
    assert peaks(values, 3, 1).tolist() == [1, 5, 8]
    assert peaks(values, 2, 4).tolist() == [1, 8]


def test_a_border_is_found_within_a_few_tokens():
    true, found = np.array([10, 30, 50]), np.array([12, 33, 70, 71])
    assert matched(found, true, 2) == pytest.approx((1 / 3, 1 / 4))
    assert matched(found, true, 3) == pytest.approx((2 / 3, 2 / 4))
    assert matched(found[:0], true, 3) == (0, 0)


def test_places_by_lot_find_what_chance_has_them_find():
    """Each of ``count`` places is one of ``length - 1``, of which 2 ``within`` + 1 are near."""
    _, right = by_lot(40, 1001, np.array([100, 500, 900]), 5)
    assert right == pytest.approx(3 * 11 / 1000, rel=0.3)
    found, _ = by_lot(40, 1001, np.array([100, 500, 900]), 5)
    assert found == pytest.approx(1 - (1 - 11 / 1000) ** 40, rel=0.2)


def test_planted_kinds_and_borders_are_found_and_noise_is_not(rng):
    traces = planted(rng)
    telling = [0.1, 0.5, 0.9]
    sparsity = []
    for trace in traces:
        noise = rng.random((3, len(trace.answer)))
        noise[1] = np.array(telling)[trace.kinds] + 0.05 * noise[1]
        sparsity.append(noise)
    parts = [unit_means(*one) for one in zip(traces, sparsity, strict=True)]
    kinds = kinds_found(*zip(*parts, strict=True))
    for pair, one in kinds.items():
        higher, _, lower = pair.split()
        right = telling[KINDS.index(higher)] > telling[KINDS.index(lower)]
        assert one["best_layer"] == 1 and one["held_out"] == right
        assert one["interval"] == [right, right]
        assert abs(one["layers"][0] - 0.5) < 0.35
    attention = [rng.random(len(trace.answer)) for trace in traces]
    borders = borders_found(traces, sparsity, attention, [t.borders() for t in traces], 3)
    assert borders["newline"]["found"] == borders["newline"]["right"] == 1
    assert borders["sparsity"]["layer"] == 1 and borders["sparsity"]["found"] > 0.95
    assert abs(borders["attention"]["found"] - borders["attention"]["found_by_lot"]) < 0.2


def test_the_reasoners_traces_know_their_paragraphs():
    [trace] = of_reasoner(200, 1)
    text = vocabulary.decode(trace.answer)
    paragraphs = [part for part in text.split("\n\n") if part.strip()]
    assert trace.units[-1] == len(paragraphs)
    starts = np.flatnonzero(np.array(trace.answer) == vocabulary.BREAK)
    named = [KINDS[kind] for kind in trace.kinds[starts]]
    for paragraph, kind in zip(paragraphs, named, strict=True):
        words = paragraph.split()
        if words[0] == "Wait":
            assert kind == "T"
        if words[:2] == ["To", "get"]:
            assert kind == "R"
    changes = [int(s) for s, k, b in zip(starts[1:], named[1:], named, strict=False) if k != b]
    assert trace.borders().tolist() == changes


def of_lines(tmp_path, lm, *records, tokens=99):
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return list(of_file(path, lm, tokens))


def test_a_files_sentences_label_its_tokens(tmp_path, lm):
    words = ["Recall u8.", "So u8 is 4.", "Wait, the last step is wrong."]
    tags = ["plan_generation", "active_computation", "self_checking"]
    chunks = [{"chunk": w, "function_tags": [t]} for w, t in zip(words, tags, strict=True)]
    record = {"id": "a", "prompt": "Find u8 .", "solution": " ".join(words), "chunks": chunks}
    [trace] = of_lines(tmp_path, lm, record)
    assert lm.tokenizer.decode(trace.answer) == record["solution"]
    sizes = [3, 5, 8]
    assert trace.units.tolist() == np.repeat([1, 2, 3], sizes).tolist()
    assert [KINDS[kind] for kind in trace.kinds] == [*"RRR", *"EEEEE", *"TTTTTTTT"]
    assert trace.borders().tolist() == [3, 8]
    record["chunks"] = chunks[1:]
    [partly] = of_lines(tmp_path, lm, record, tokens=10)
    assert len(partly.prompt) + len(partly.answer) == 10
    assert partly.kinds[:3].tolist() == [UNKNOWN] * 3 and partly.borders().tolist() == []


def test_what_is_no_file_of_traces_is_refused(tmp_path, lm):
    with pytest.raises(UsageError, match="no labelled traces"):
        of_lines(tmp_path, lm, {"prompt": "Find u8 ."})


def test_attention_is_that_of_the_parts_last_queries(lm, rng):
    """Against the same in one pass for each part, by hand from the definition of softmax."""
    ids = [1, *rng.integers(5, 400, 47).tolist()]
    found = attention_of(lm, ids, every=20, queries=3)
    assert found.shape == (48,)
    short = attention_of(lm, ids[:20], every=20, queries=3)
    np.testing.assert_allclose(found[:20], short, atol=1e-5)
    assert short.sum() == pytest.approx(1, abs=1e-4)  # each query's weights add up to 1
    whole = attention_of(lm, ids, every=48, queries=3)
    np.testing.assert_allclose(found[40:], whole[40:], atol=1e-5)


@pytest.mark.slow
def test_the_command_measures_the_reasoner(tmp_path, capsys):
    out = tmp_path / "found.json"
    main(["--model", str(MODEL), "--levels", "200", "--problems", "4", "--out", str(out)])
    found = json.loads(out.read_text())["results"]["reasoner 200"]
    assert found["borders_found"]["newline"]["found"] == 1
    assert "R above" in capsys.readouterr().out
