"""What is hidden is where it should be, once, in prompts of the length that was asked for."""

import dataclasses
import json

import pytest

import kvjax
from kvjax.decoding.requests import read_prompt
from kvjax.eval import haystack, retrieval
from kvjax.eval.options import EvalConfig
from kvjax.eval.problems import Problem, judge_contains
from kvjax.eval.recipes import shape_of
from kvjax.eval.ruler import judge_all, ruler_group
from tests.cli.conftest import model  # noqa: F401
from tests.eval.test_reasoning import answering, result  # noqa: F401

LENGTHS, DEPTHS = (500, 900), (0.0, 0.5, 1.0)


def config(model, **given) -> retrieval.RetrievalConfig:  # noqa: F811
    own = {"lengths": "500,900", "depths": "0,0.5,1", "problems": 2, "model": str(model)}
    return retrieval.RetrievalConfig(**own | given)


def asked(model, **given):  # noqa: F811
    own = config(model, **given)
    shape = shape_of(own)
    small = dataclasses.replace(shape.config, context_length=1000)  # longer tries are made
    return haystack.hidden_groups(dataclasses.replace(shape, config=small), own)


def test_prompts_are_as_long_as_was_asked_for(model):  # noqa: F811
    lm, options = (
        kvjax.load(model),
        haystack.prompt_options(EvalConfig().decoding(), kvjax.recipes.full()),
    )
    for group in asked(model):
        longest = 40 if group.task == "pairs" else 75  # characters of a line
        for problem in group.problems:
            count = len(read_prompt(lm, 0, problem.prompt, options).ids)
            assert problem.level - longest < count <= problem.level


def test_what_is_hidden_stands_once_at_its_depth(model):  # noqa: F811
    found = asked(model)
    assert [(one.task, one.problems[0].level) for one in found] == [
        (task, length) for task in ("needle", "pairs") for length in LENGTHS
    ]
    for group in found:
        assert [one.depth for one in group.problems] == [d for d in DEPTHS for _ in range(2)]
        for problem in group.problems:
            head, *lines = problem.prompt.split("\n")[:-2]
            assert problem.prompt.count(problem.gold) == 1 and head
            at = next(n for n, line in enumerate(lines) if problem.gold in line)
            assert at == round(problem.depth * (len(lines) - 1))
            name = lines[at].rpartition(": ")[0] or lines[at].split()[4]
            assert name in problem.prompt.rpartition("\n")[2]


def test_problems_are_the_same_again_and_others_of_another_seed(model):  # noqa: F811
    one, same, other = (asked(model, lengths="500", seed=seed) for seed in (0, 0, 1))
    assert [a.problems == b.problems for a, b in zip(one, same, strict=True)] == [True, True]
    assert not any(
        a.prompt == b.prompt for a, b in zip(one[0].problems, other[0].problems, strict=True)
    )
    assert len({problem.prompt for problem in one[0].problems}) == 6


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("The number is 12345.", True),
        ("12345", True),
        ("112345", False),
        ("123456", False),
        ("12345 or 54321", True),
        ("54321 or 12345", False),
        ("1234", False),
        ("none", False),
    ],
)
def test_the_first_number_counts(text, right):
    problem = Problem("a", "b", "12345")
    assert judge_contains(problem, result([1], text))["right"] is right


RULER = {"index": 7, "input": "Keys: ... What is k?", "outputs": ["AB-1", "c2"], "length": 900}


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("they are ab-1 and C2.", "AB-1, c2", True),
        ("AB-1", "AB-1", False),
        ("AB-2 c", None, False),
    ],
)
def test_rulers_answers_hold_all_outputs(tmp_path, text, answer, right):
    path = tmp_path / "niah.jsonl"
    path.write_text("\n".join(json.dumps(RULER | {"index": n}) for n in (7, 3, 9)))
    group = ruler_group(path, 2, 30)
    assert [one.id for one in group.problems] == ["7", "3"] and group.task == "niah"
    assert group.problems[0].prompt == RULER["input"]
    assert (group.max_new_tokens, group.answer_tokens) == (30, 30)
    assert judge_all(group.problems[0], result([1], text)) == {"answer": answer, "right": right}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: JSONDecodeError"),
        ("[1]", "line 1: TypeError"),
        (json.dumps({"input": "a"}), "line 1: KeyError"),
        (json.dumps(RULER | {"outputs": "AB-1"}), "`outputs` a list"),
        (json.dumps(RULER | {"outputs": []}), "`outputs` a list"),
        (json.dumps(RULER | {"input": 3}), "`input` must be a text"),
        (json.dumps(RULER) + "\n" + json.dumps(RULER), "two problems with the index '7'"),
        ("", "no lines"),
    ],
)
def test_files_of_another_form_are_told(tmp_path, line, message):
    path = tmp_path / "niah.jsonl"
    path.write_text(line)
    with pytest.raises(kvjax.UsageError, match=message):
        ruler_group(path, 9, 30)


@pytest.fixture
def find(model, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr("kvjax.eval.command.keep_compiled_programs", lambda: None)
    (tmp_path / "recipes.yaml").write_text("- {method: streaming, share: 1/2}\n- method: full")

    def run(*argv):
        own = ["--model", model, "--out", tmp_path / "out", "--recipes", tmp_path / "recipes.yaml"]
        code = retrieval.main([*map(str, own), "--dtype", "float32", *map(str, argv)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_figures_are_of_every_length_and_depth(find, answering, tmp_path, model):  # noqa: F811
    golds = {}
    for group in asked(model):
        for problem in group.problems:
            golds[problem.prompt[-60:]] = problem
    lm = kvjax.load(model)

    def give(method, prompt, seed):
        problem = golds[lm.tokenizer.decode(prompt)[-63:-3]]
        lost = method == "streaming" and problem.depth == 0.5
        return result([1], "0" if lost else problem.gold)

    answering(give)
    words = ("--lengths", "500,900", "--depths", "0,0.5,1", "--problems", 2)
    code, _, err = find(*words)
    assert code == 0, err
    found = json.loads((tmp_path / "out" / "retrieval.json").read_text())
    cells = {(r["task"], r["level"], r["recipe"]): r for r in found["results"]}
    assert len(cells) == 12 and len(found["by_depth"]) == 28
    lossy = cells["needle", 900, "streaming 1/2"]
    assert lossy["right"] == pytest.approx(2 / 3) and lossy["paired"]["lost"] == 2
    assert cells["pairs", "all", "full"]["right"] == 1
    depth = {
        tuple(r["level"]): r
        for r in found["by_depth"]
        if r["task"] == "pairs" and r["method"] == "streaming" and r["level"] != "all"
    }
    assert depth[500, 0.5]["right"] == 0 and depth[500, 1.0]["right"] == 1
    assert lossy["budget"] > cells["needle", 500, "streaming 1/2"]["budget"] > 37


def test_files_are_asked_beside_what_is_generated(find, answering, tmp_path):  # noqa: F811
    path = tmp_path / "niah.jsonl"
    path.write_text(json.dumps(RULER))
    chats = []
    answering(lambda method, prompt, seed: chats.append(len(prompt)) or result([1], "c2, AB-1"))
    words = ("--lengths", "500", "--depths", "0", "--problems", 1, "--only", "full")
    for template in ("--chat-template", "--no-chat-template"):
        out = tmp_path / template
        code, _, err = find("--tasks", f"pairs,{path}", *words, template, "--out", out)
        assert code == 0, err
        found = json.loads((out / "retrieval.json").read_text())
        right = {(one["task"], one["level"]): one["right"] for one in found["results"]}
        assert right == {("niah", "all"): 1.0, ("pairs", 500): 0.0}
        assert {one["task"] for one in found["by_depth"]} == {"pairs"}
    assert min(chats[:2]) > min(chats[2:])  # the template takes some


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--tasks", "straw"), "straw"),
        (("--tasks", "a/x.jsonl,b/x.jsonl"), "twice"),
        (("--tasks", "absent.jsonl"), "absent.jsonl"),
        (("--lengths", "a"), "--lengths"),
        (("--lengths", "90"), "too short"),
        (("--lengths", "70000"), "context"),
        (("--depths", "2"), "--depths"),
    ],
)
def test_what_cannot_be_hidden_is_refused(find, argv, message):
    code, _, err = find(*argv)
    assert code == 2 and message in err
