"""Choices are scored as one pass without a cache scores them, and read as people write them."""

import json

import jax
import numpy as np
import pytest

import kvjax
from kvjax import recipes
from kvjax.cache import plan
from kvjax.compare import compare
from kvjax.eval import choice, choices
from kvjax.eval.items import read_items, split
from kvjax.eval.likelihood import Scored, log_likelihoods
from tests.cli.conftest import model  # noqa: F401
from tests.decoding import small

PROMPTS, NEW = (50, 9, 33, 40), (1, 20, 37, 5)
SMALL = {"window": 4, "tick": 4, "recent": 4, "sinks": 2, "page_size": 16}


def rows() -> tuple[list[list[int]], list[list[int]]]:
    return small.prompts(PROMPTS, seed=3), small.prompts(NEW, seed=4)


def scored(recipe, prompts, following, rows=4):
    lm = small.lm()
    planned = plan(
        lm.config,
        recipe,
        batch_size=rows,
        prompt_tokens=max(PROMPTS),
        max_new_tokens=max(NEW),
        dtype=lm.dtype,
        parameter_bytes=0,
    )
    return log_likelihoods(lm, prompts, following, planned)


def greedy(prompt: list[int], count: int) -> list[int]:
    """What the model says behind a prompt, by one pass a token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(kvjax.forward(small.lm(), ids)[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("codec", [None, pytest.param("bf16", marks=pytest.mark.slow)])
def test_likelihoods_are_those_of_one_pass(codec):
    prompts, following = rows()
    following[3] = greedy(prompts[3], NEW[3])
    recipe = recipes.full(16) if codec is None else recipes.uniform(codec, **SMALL)
    found = scored(recipe, prompts, following)
    assert [own.greedy for own in found] == [False, False, False, True]
    for prompt, ids, own in zip(prompts, following, found, strict=True):
        logits = kvjax.forward(small.lm(), prompt + ids)[0]
        logs = np.asarray(jax.nn.log_softmax(logits))[len(prompt) - 1 : -1]
        np.testing.assert_allclose(own.logs, logs[np.arange(len(ids)), ids], atol=2e-5)
    counts = [len(prompt) + len(ids) - 1 for prompt, ids in zip(prompts, following, strict=True)]
    assert len({own.full_bytes / n for own, n in zip(found, counts, strict=True)}) == 1


@pytest.mark.slow
def test_a_compressed_cache_is_that_of_a_comparison():
    """Rows of any lengths together, against one row at a time on the path that is tested most."""
    prompts, following = rows()
    recipe = recipes.streaming(budget=24, codec="int4", **SMALL, every=8)
    found = scored(recipe, prompts, following)
    ids, prompt = [*prompts[2], *following[2]], len(prompts[2])
    alone = compare(small.lm(), ids, recipe=recipe, prompt_tokens=prompt, by_tick=True)
    np.testing.assert_allclose(found[2].logs, -alone.nlls[0], rtol=3e-3, atol=3e-4)
    assert alone.kl_mean > 1e-4
    assert found[2].peak_bytes == pytest.approx(alone.bytes["peak"], rel=0.2)


FORMS = {
    "arc": {
        "id": "q1",
        "question": "What is wet?",
        "choices": {"text": ["sand", "rain"], "label": ["A", "B"]},
        "answerKey": "B",
    },
    "piqa": {"goal": "Boil water", "sol1": "heat it", "sol2": "eat it", "label": 0},
    "hellaswag": {
        "ind": 4,
        "activity_label": "Cooking",
        "ctx_a": "A man [header] stands.",
        "ctx_b": "he",
        "endings": ["sits [substeps] down.", "flies."],
        "label": "1",
    },
    "winogrande": {
        "sentence": "Ann thanked Bea because _ had helped.",
        "option1": "Ann",
        "option2": "Bea",
        "answer": "2",
    },
    "own": {"context": "One, two,", "choices": ["three", "four", "five"], "gold": 2},
    "lambada": {"context": "She read the", "target": " signs"},
}
READ = {
    "arc": (("Question: What is wet?\nAnswer:",) * 2, (" sand", " rain"), 1),
    "piqa": (("Question: Boil water\nAnswer:",) * 2, (" heat it", " eat it"), 0),
    "hellaswag": (("Cooking: A man stands. He",) * 2, (" sits down.", " flies."), 1),
    "winogrande": (
        ("Ann thanked Bea because Ann", "Ann thanked Bea because Bea"),
        (" had helped.",) * 2,
        1,
    ),
    "own": (("One, two,",) * 3, (" three", " four", " five"), 2),
    "lambada": (("She read the",), (" signs",), 0),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read(form, tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps(FORMS[form]) + "\n")
    [item] = read_items(path, None, 0)
    assert (item.contexts, item.continuations, item.gold) == READ[form]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answerKey": "C"}, "ValueError"),
        ({"choices": {"text": ["a"], "label": ["B"]}}, "1 choices"),
        ({"choices": {"text": ["a", ""], "label": ["A", "B"]}}, "empty"),
        ({"choices": None}, "TypeError"),
    ],
)
def test_lines_of_no_form_are_told(tmp_path, change, message):
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps(FORMS["arc"] | change))
    with pytest.raises(kvjax.UsageError, match=f"line 1: .*{message}"):
        read_items(path, None, 0)


def test_a_token_across_the_border_is_scored():
    class Pairs:
        """Two characters a token."""

        def encode(self, text):
            return [text[at : at + 2] for at in range(0, len(text), 2)]

    assert split(Pairs(), "abcd", " ef") == (["ab", "cd"], [" e", "f"])
    assert split(Pairs(), "abc", " ef") == (["ab"], ["c ", "ef"])


@pytest.fixture
def choose(model, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr("kvjax.eval.command.keep_compiled_programs", lambda: None)
    for name, form in FORMS.items():
        lines = [form | {"id": str(n)} for n in range(3)]
        if name == "own":
            lines[1]["gold"], lines[2]["context"] = 0, "Three, two,"
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "recipes.yaml").write_text("- {method: full, page_size: 16}")

    def run(*argv):
        own = {"--model": model, "--data": tmp_path, "--out": tmp_path / "out"}
        own |= {"--recipes": tmp_path / "recipes.yaml", "--dtype": "float32", "--batch-size": 7}
        words = [str(word) for pair in own.items() for word in pair]
        code = choice.main([*words, *map(str, argv)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_choices_are_counted_by_all_rules(choose, tmp_path, monkeypatch):
    """ "three" has 5 characters and 6 tokens, "four" and "five" have 4 and 5."""
    asked = []
    # By sum, "five"; by characters, "three"; by tokens, "five" or, of the second item, "three".
    sums = iter([-4.9, -4.2, -4.0, -4.5, -4.2, -4.0, -4.9, -4.2, -4.0])

    def scores(lm, prompts, following, planned, seed):
        asked.append([len(ids) for ids in following])
        assert len(prompts) <= planned.geometry.rows == 7
        found = [np.full(len(ids), next(sums) / len(ids)) for ids in following]
        return [Scored(logs, False, 50, 25) for logs in found]

    monkeypatch.setattr(choices, "log_likelihoods", scores)
    code, out, err = choose("--tasks", "own")
    assert code == 0, err
    [found] = json.loads((tmp_path / "out" / "choice.json").read_text())["results"]
    assert (found["task"], found["method"], found["items"]) == ("own", "full", 3)
    right = [found[rule]["right"] for rule in choices.RULES]
    assert right == [pytest.approx(2 / 3), pytest.approx(1 / 3), 1.0]
    assert found["ratio"] == 2 and out.count("\n") == 1
    assert asked == [[6, 5, 5] * 2, [6, 5, 5]]
    assert choose("--tasks", "own")[0] == 0 and len(asked) == 2  # all is there


def test_one_choice_is_right_where_the_model_would_say_it(choose, tmp_path, monkeypatch):
    """What is said counts alone, whatever its likelihood; perplexity is of what was to be said."""
    said = iter([(-1.0, True), (-2.0, False), (-6.0, True)])

    def scores(lm, prompts, following, planned, seed):
        found = [(np.full(len(ids), 1 / len(ids)), *next(said)) for ids in following]
        return [Scored(logs * total, greedy, 50, 25) for logs, total, greedy in found]

    monkeypatch.setattr(choices, "log_likelihoods", scores)
    code, out, err = choose("--tasks", "lambada")
    assert code == 0, err
    [found] = json.loads((tmp_path / "out" / "choice.json").read_text())["results"]
    assert [found[rule]["right"] for rule in choices.RULES] == [pytest.approx(2 / 3)] * 3
    assert found["perplexity"] == pytest.approx(np.exp(3.0)) and "perplexity 20.09" in out


def row(recipe, method, name, right):
    own = {"budget": None, "codec": None, "share": None, "row_bytes": 1}
    place = {"task": "t", "id": name, "recipe": recipe, "method": method}
    logs = [-1.0, -2.0]
    return {**place, **own, "right": right, "logs": logs, "bytes": {"peak": 2.0, "full_bf16": 4.0}}


def test_items_are_paired():
    rights = [(True, True), (True, False), (False, True), (True, False)]
    rows = []
    for n, pair in enumerate(rights):
        for recipe, method, good in zip(("full", "r"), ("full", "rkv"), pair, strict=True):
            rows.append(row(recipe, method, str(n), dict.fromkeys(choices.RULES, good)))
    full, ours = choices.summarise(rows)
    assert full["sum"]["right"] == 0.75 and ours["sum"]["right"] == 0.5
    assert ours["per_token"]["paired"] == {"items": 4, "lost": 2, "won": 1, "p": 1.0}
    assert ours["ratio"] == 0.5 and "perplexity" not in ours


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "--tasks"),
        (("--tasks", "absent"), "absent.jsonl"),
        (("--tasks", "own", "--batch-size", 2), "--batch-size 2"),
        (("--tasks", "own,own"), "twice"),
        (("--tasks", "own", "--first", 3), "none from number 3"),
    ],
)
def test_what_cannot_be_asked_is_refused(choose, argv, message):
    code, _, err = choose(*argv)
    assert code == 2 and message in err
