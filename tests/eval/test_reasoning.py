"""The count of right answers: what it takes for right, and that nothing is computed twice."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import kvjax
from kvjax.decoding import Event, Result
from kvjax.decoding.events import History
from kvjax.errors import UsageError
from kvjax.eval import problems, reasoning
from kvjax.eval.summary import summarise
from kvjax.models.config import ModelConfig
from kvjax.train.reasoner.export import export
from kvjax.train.reasoner.model import CONFIG, init
from kvjax.train.reasoner.task import problem

RECIPES = """
- method: full
- {name: mine, method: streaming, kv_budget: 96, protect_prompt: true}
- {name: few bytes, method: random, share: 1/64}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    fields = {**CONFIG, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    directory = tmp_path_factory.mktemp("reasoner")
    export(directory, fields, init(ModelConfig.from_hf(fields), 0), "nothing")
    return directory


@pytest.fixture
def evaluate(model, tmp_path, monkeypatch, capsys):
    """Run the command; returns its exit code, output, and where its files are."""
    monkeypatch.setattr("kvjax.eval.command.keep_compiled_programs", lambda: None)
    recipes = tmp_path / "recipes.yaml"
    recipes.write_text(RECIPES)

    def run(*argv, main=reasoning.main):
        own = ["--model", model, "--recipes", recipes, "--out", tmp_path / "out"]
        code = main([*map(str, own), "--dtype", "float32", *map(str, argv)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


REASONER = ("--tasks", "reasoner", "--levels", "200", "--problems", 3, "--limit", 1.5)


def result(tokens, text: str = "", finish: str = "stop") -> Result:
    report = {
        "usage": {"think": 0},
        "timing": {"prefill_s": 1.0, "decode_s": 2.0},
        "kv": {
            "bytes": {"full_bf16": 100},
            "ratio": {"peak": 0.5, "time_avg": 0.4, "end": 0.3},
            "live_tokens": {"max": 7.0},
        },
    }
    counts = np.array([1, 2])
    history = History(counts, counts, np.array([40, 60]), 10, 1)
    return Result(text, tuple(tokens), finish, 4, report=report, history=history)


@pytest.fixture
def answering(monkeypatch):
    """Has answers given by a function of recipe, prompt and seed; counts what is asked."""
    asked = []

    def use(give, stop_after=None):
        def stream(lm, prompts, *, recipe, seed, **options):
            for row, prompt in enumerate(prompts):
                if stop_after is not None and len(asked) == stop_after:
                    raise KeyboardInterrupt
                asked.append((recipe.name, tuple(prompt), seed))
                yield Event("done", row=row, result=give(recipe.name, tuple(prompt), seed))

        monkeypatch.setattr(kvjax, "stream", stream)
        return asked

    return use


def traces() -> dict[tuple[int, ...], tuple[int, ...]]:
    found = [problem(200, index) for index in range(3)]
    return {one.tokens[: one.prompt]: one.tokens[one.prompt :] for one in found}


def read(tmp_path, name="reasoning.json"):
    return json.loads((tmp_path / "out" / name).read_text())


def test_right_answers_are_counted_and_paired(evaluate, answering, tmp_path):
    known, other = traces(), problem(200, 9)
    first, second, third = known

    def give(method, prompt, seed):
        if method == "full":
            return result(known[prompt])
        late = known[first][:1] * 150 + known[first]
        wrong = other.tokens[other.prompt :]
        given = {first: late, second: known[second][1:], third: wrong}
        return result(given[prompt], finish="repetition" if prompt == third else "stop")

    answering(give)
    code, out, err = evaluate(*REASONER)
    full, mine, refused = read(tmp_path)["results"]
    assert code == 6 and "fewest tokens" in refused["refused"] and "share 1/64" in err
    assert (full["right"], full["exact"], full["late"], full["length"]) == (1.0, 1.0, 0.0, 1.0)
    assert mine["right"] == pytest.approx(1 / 3)
    assert mine["late"] == mine["loops"] == pytest.approx(1 / 3) and mine["exact"] == 0
    assert mine["paired"] == {"problems": 3, "lost": 2, "won": 0, "p": 0.5}
    assert mine["bytes"]["peak"] == 60 and mine["bytes"]["mean"] == 50
    assert mine["seconds"] == 3 and mine["length_beside_full"] > 1.2
    assert "lost 2, won 0" in out and "full" in out


def test_what_is_there_is_not_answered_again(evaluate, answering, tmp_path):
    known = traces()

    def give(method, prompt, seed):
        return result(known[prompt])

    asked = answering(give, stop_after=4)
    assert evaluate(*REASONER)[0] == 130
    rows = (tmp_path / "out" / "reasoning.jsonl").read_bytes()
    assert len(asked) == 4 == len(rows.splitlines())
    answering(give)
    evaluate(*REASONER)
    assert len(asked) == 6 == len(set(asked))
    assert (tmp_path / "out" / "reasoning.jsonl").read_bytes().startswith(rows)
    before = read(tmp_path)["results"]
    evaluate(*REASONER)
    assert len(asked) == 6 and read(tmp_path)["results"] == before
    code, _, err = evaluate(*REASONER, "--seed", 1)
    assert code == 2 and "another" in err and len(asked) == 6


def test_parts_are_gathered_to_what_one_run_finds(evaluate, answering, tmp_path):
    known = traces()
    asked = answering(lambda method, prompt, seed: result(known[prompt][method != "full" :]))
    assert evaluate(*REASONER)[0] == 6
    whole = read(tmp_path)["results"]
    for only in ("mine", "full|few bytes"):
        evaluate(*REASONER, "--only", only, "--out", tmp_path / "parts" / only[:4])
    asked.clear()
    gather = ("--gather", tmp_path / "parts", "--out", tmp_path / "found")
    code, _, err = evaluate(*REASONER, *gather)
    found = json.loads((tmp_path / "found" / "reasoning.json").read_text())
    assert code == 6 and found["results"] == whole and not asked
    assert "paired" in found["results"][1] and "6 rows are there, 0 are not" in err
    assert not (tmp_path / "found" / "reasoning.jsonl").exists()
    assert evaluate(*REASONER, *gather, "--only", "mine")[0] == 0
    found = json.loads((tmp_path / "found" / "reasoning.json").read_text())
    assert [one["recipe"] for one in found["results"]] == ["mine"]
    code, _, err = evaluate(*REASONER, *gather, "--seed", 1)
    assert code == 2 and "from another model" in err
    part = tmp_path / "parts" / "mine" / "reasoning.jsonl"
    part.write_bytes(b"".join(part.read_bytes().splitlines(keepends=True)[:2]))
    assert "5 rows are there, 1 are not" in evaluate(*REASONER, *gather)[2] and not asked


def test_a_share_of_an_answer_is_one_of_the_mean_trace():
    lengths = [len(trace) for trace in traces().values()]
    group = problems.reasoner_group(200, 3, 0, 1.5)
    assert group.answer_tokens == round(sum(lengths) / 3) != 200
    assert group.max_new_tokens == round(1.5 * max(lengths))


def test_samples_vary_the_seed_and_need_a_temperature(evaluate, answering, tmp_path):
    known = traces()
    asked = answering(lambda method, prompt, seed: result(known[prompt][seed % 2 :]))
    assert evaluate(*REASONER, "--samples", 2)[0] == 2
    evaluate(*REASONER, "--samples", 2, "--temperature", 0.6)
    assert {seed for _, _, seed in asked} == {0, 1} and len(asked) == 12
    full = read(tmp_path)["results"][0]
    assert (full["problems"], full["rows"], full["exact"]) == (3, 6, 0.5)


def test_it_decodes_with_the_model(evaluate, tmp_path):
    (tmp_path / "recipes.yaml").write_text("- {name: mine, method: streaming, kv_budget: 96}")
    assert evaluate(*REASONER[:-1], 0.1)[0] == 0
    [mine] = read(tmp_path)["results"]
    assert mine["right"] == 0 and mine["truncated"] == mine["unanswered"] == 1
    assert mine["length"] < 0.12 and mine["budget"] == 96 and read(tmp_path)["commands"]
    assert mine["bytes"]["peak"] > mine["bytes"]["full_bf16"] / 4


def test_the_reasoners_problems_are_for_its_model(evaluate, tmp_path):
    golden = pathlib.Path(__file__).parents[1] / "golden" / "llama"
    code, _, err = evaluate(*REASONER, "--model", golden)
    assert code == 2 and "eval/models/reasoner" in err


def test_boxes_of_a_file_are_graded(evaluate, answering, tmp_path):
    lines = [
        {"problem": "What is 1/2 of 1?", "answer": "\\frac{1}{2}", "level": 1},
        {"question": "How many?", "answer": "She has <<1+1=2>>2.\n#### 1,002", "id": "b"},
        {"prompt": "Put it into \\boxed{}: three", "answer": 3},
    ]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = iter([r"\boxed{3} or rather \boxed{0.5}", r"It is \boxed{1002}", "three: 3"])
    answering(lambda *_: result([1], next(texts)))
    group = problems.file_group("sums", path, None, 0, 8)
    assert [one.prompt.count("\\boxed") for one in group.problems] == [1, 1, 1]
    assert [one.id for one in group.problems] == ["0", "b", "2"]
    judged = [group.judge(one, result([1], next(texts))) for one in group.problems]
    assert [one["right"] for one in judged] == [True, True, False]
    assert judged[2]["answer"] is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1"),
        ("[]", "JSON object"),
        ('{"prompt": "a", "problem": "b", "answer": 1}', "one text"),
        ('{"prompt": "a"}', "answer"),
        ('{"prompt": "a", "answer": 1, "level": []}', "level"),
        ('{"prompt": "a", "answer": 1, "id": 1}\n{"prompt": "b", "answer": 1, "id": "1"}', "id"),
        ("", "none"),
    ],
)
def test_files_that_cannot_be_used_are_told(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(UsageError, match=message):
        problems.file_group("bad", path, None, 0, 8)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "--tasks"),
        (("--tasks", "gsm8k"), "--data"),
        (("--tasks", "gsm8k", "--data", "absent"), "1,319"),
        (("--tasks", "chess"), "chess"),
        (("--tasks", "reasoner,reasoner", "--problems", 1), "twice"),
        (("--tasks", "reasoner", "--levels", "300"), "--levels"),
    ],
)
def test_what_cannot_be_asked_is_refused(evaluate, argv, message):
    code, out, err = evaluate(*argv)
    assert code == 2 and message in err and not out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("method: rkv", "list"),
        ("- rkv", "recipe 1"),
        ("- {method: rkv, shares: 1/2}", "shares"),
        ("- {method: rkv, share: 0}", "share"),
        ("- {method: rkv, share: 1/2, kv_budget: 100}", "exclude"),
        ("- {method: uniform, share: 1/2}", "keeps every token"),
        ("- {method: rkv, kv_budget: 10}", "--kv-budget 10"),
        ("- {method: rkv, model: x}", "model"),
        ("- {method: full}\n- {method: full}", "two recipes"),
        ("- {method: full, kv_bits: 4}", "--kv-bits 4"),
        ("", "list"),
    ],
)
def test_recipes_that_cannot_work_are_refused(evaluate, tmp_path, text, message):
    (tmp_path / "recipes.yaml").write_text(text)
    code, _, err = evaluate(*REASONER)
    assert code == 2 and message in err and "Traceback" not in err


def row(task, level, name, recipe, right, sample=0):
    method = "full" if recipe == "full" else "rkv"
    place = {"task": task, "level": level, "id": name, "recipe": recipe, "sample": sample}
    own = {"method": method, "budget": None, "codec": None, "share": None, "row_bytes": 1}
    return {**place, **own, "right": right, "finish": "stop", "answer": "1"}


def test_levels_stand_alone_and_together():
    rights = {1: [1, 1, 0], 2: [0, 1, 0]}
    rows = [
        row("t", level, str(n), recipe, bool(right) and (recipe == "full" or n != 1))
        for level, own in rights.items()
        for n, right in enumerate(own)
        for recipe in ("full", "r")
    ]
    rows += [row("plain", None, "0", "full", True)]
    found = {(one["task"], one["level"], one["recipe"]): one for one in summarise(rows, _level)}
    assert len(found) == 7 and ("plain", "all", "full") in found
    assert found["t", 1, "full"]["right"] == pytest.approx(2 / 3)
    assert found["t", "all", "full"]["right"] == pytest.approx(3 / 6)
    assert found["t", "all", "r"]["paired"] == {"problems": 6, "lost": 2, "won": 0, "p": 0.5}


def _level(one):
    return one["level"]


RIGHTS = {("a", "full"): 8, ("a", "r"): 0, ("b", "full"): 4, ("b", "r"): 4}


def test_a_problem_is_lost_by_the_majority_of_its_samples():
    """Eight samples of one problem are not eight problems."""
    rows = [
        row("t", None, name, recipe, right, sample)
        for (name, recipe), count in RIGHTS.items()
        for sample in range(8)
        for right in [sample < count]
    ]
    pair = next(one["paired"] for one in summarise(rows, _level) if one["recipe"] == "r")
    assert pair == {"problems": 2, "lost": 1, "won": 0, "p": 1.0}


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_results(model, tmp_path):
    """For real: SIGKILL once the first rows are there."""
    command = [sys.executable, "-m", "kvjax.eval.reasoning", "--model", str(model), "--quiet"]
    command += ["--tasks", "reasoner", "--levels", "200", "--problems", "8", "--limit", "0.4"]
    command += ["--batch-size", "2", "--dtype", "float32", "--commit", "here"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}

    def out(name):
        return [*command, "--out", str(tmp_path / name)]

    subprocess.run(out("whole"), env=env, check=True, capture_output=True)
    rows = tmp_path / "killed" / "reasoning.jsonl"
    with subprocess.Popen(out("killed"), env=env, stdout=subprocess.DEVNULL) as process:
        while not (rows.exists() and rows.stat().st_size):
            time.sleep(0.02)
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    before = rows.read_bytes()
    subprocess.run(out("killed"), env=env, check=True, capture_output=True)
    assert rows.read_bytes().startswith(before[: before.rindex(b"\n") + 1])

    def figures(name):
        content = (tmp_path / name / "reasoning.jsonl").read_text().splitlines()
        found = sorted(map(json.loads, content), key=lambda one: one["id"])
        return [{**one, "seconds": 0} for one in found]

    assert figures("killed") == figures("whole") and len(figures("whole")) == 8
    assert pathlib.Path(tmp_path / "killed" / "reasoning.json").exists()
