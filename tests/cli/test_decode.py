"""The command from flags to answers, run in this process on a small real model."""

import json
import pathlib

import pytest

import kvjax

SHORT = ("--max-new-tokens", "6")


@pytest.fixture
def rows_file(tmp_path):
    """A file of JSON lines."""

    def write(*lines: str) -> pathlib.Path:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(line + "\n" for line in lines))
        return path

    return write


@pytest.fixture
def answer(model):
    """What the library answers to a prompt."""
    lm = kvjax.load(model)

    def decode(prompt: str, **options) -> kvjax.Result:
        return kvjax.generate(lm, [prompt], max_new_tokens=6, **options)[0]

    return decode


def test_text_is_all_that_standard_output_gets(decode, answer):
    outcome = decode("-p", "hello", *SHORT)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == answer("hello").text + "\n"


def test_streamed_text_is_the_same(decode, answer):
    assert decode("-p", "hello", "--stream", *SHORT).out == answer("hello").text + "\n"


def test_options_reach_the_library(decode, answer):
    sampled = decode("-p", "hello", "--temp", "2", "--top-k", "50", "--seed", "5", *SHORT)
    assert sampled.out == answer("hello", temperature=2.0, top_k=50, seed=5).text + "\n"
    plain = decode("-p", "hello", "--no-chat-template", "--greedy", *SHORT)
    assert plain.out == answer("hello", chat=False).text + "\n"
    told = decode("-p", "hello", "--system-prompt", "be brief", *SHORT)
    assert told.out == answer("hello", system_prompt="be brief").text + "\n"
    assert len({sampled.out, plain.out, told.out}) == 3


def test_prompts_come_from_standard_input_and_files(decode, tmp_path, answer):
    path = tmp_path / "prompt.txt"
    path.write_text("hello\n")
    expected = answer("hello").text + "\n"
    assert decode("-p", "-", *SHORT, stdin=b"hello\n").out == expected
    assert decode("--prompt-file", path, *SHORT).out == expected


def test_a_json_answer_is_one_record(decode, model):
    outcome = decode("-p", "hello", "--format", "json", *SHORT)
    record = json.loads(outcome.out)
    assert record["id"] == 1
    assert record["finish_reason"] == "length"
    assert record["usage"]["generated"] == 6
    assert record["timing"]["load_s"] > 0
    assert record["run"]["model"] == str(model)
    again = json.loads(decode("-p", "hello", "--format", "json", "--seed", "1", *SHORT).out)
    assert record["run"]["config_sha"] != again["run"]["config_sha"]


def test_many_prompts_are_answered_in_their_order(decode, rows_file, answer):
    prompts = {"a": "hello", "b": "who", "c": "where are you"}
    path = rows_file(*(json.dumps({"id": i, "prompt": text}) for i, text in prompts.items()))
    outcome = decode("--prompts", path, "--batch-size", "2", *SHORT)
    assert outcome.code == 0
    records = [json.loads(line) for line in outcome.out.splitlines()]
    assert {r["id"]: r["text"] for r in records} == {i: answer(p).text for i, p in prompts.items()}
    assert [record["id"] for record in records] == ["a", "b", "c"]
    listed = decode("--prompts", path, "--format", "json", *SHORT)
    assert [r["text"] for r in json.loads(listed.out)] == [r["text"] for r in records]
    text = decode("--prompts", path, "--format", "text", *SHORT)
    assert text.out == "".join(record["text"] + "\n" for record in records)


def test_a_broken_row_fails_alone(decode, rows_file, tmp_path):
    path = rows_file('{"id": 7, "prompt": "hello"}', '{"id": 8, "pro', '{"id": 9, "prompt": "b"}')
    outcome = decode("--prompts", path, "-o", tmp_path / "out.jsonl", *SHORT)
    assert outcome.code == 6
    assert outcome.out == ""
    assert outcome.err.startswith("kvjax: 1 of 3 prompts failed; the first has id 2: line 2: Unter")
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [record["finish_reason"] for record in records] == ["length", "error", "length"]
    assert records[1] == {
        "id": 2,
        "text": "",
        "reasoning": None,
        "finish_reason": "error",
        "error": records[1]["error"],
    }


@pytest.mark.parametrize("lines", [1, 2])
def test_a_row_that_is_too_long_fails_alone(decode, rows_file, lines):
    rows = [json.dumps({"prompt": "a" * (1 << 17)}), '{"prompt": "b"}']
    outcome = decode("--prompts", rows_file(*rows[:lines]), *SHORT)
    assert outcome.code == 6
    assert "shorten the prompt" in json.loads(outcome.out.splitlines()[0])["error"]
    assert len(outcome.out.splitlines()) == lines


@pytest.mark.parametrize("recorded", [True, False])
def test_a_row_that_is_alone_in_its_file_has_one_record(decode, rows_file, monkeypatch, recorded):
    def stream(*_, **__):
        if recorded:
            failed = kvjax.Result("", (), "error", 3, error="the logits hold NaN")
            yield kvjax.Event("done", row=0, result=failed)
        raise kvjax.NumericalError("the logits hold NaN")

    monkeypatch.setattr(kvjax, "stream", stream)
    outcome = decode("--prompts", rows_file('{"id": "a", "prompt": "b"}'))
    assert outcome.code == 6
    assert json.loads(outcome.out)["error"] == "the logits hold NaN"
    assert decode("-p", "b").code == 5


def test_a_full_disk_is_no_failure_of_the_row(decode, rows_file):
    path = rows_file('{"id": "a", "prompt": "b"}')
    outcome = decode("--prompts", path, "-o", "/dev/full", *SHORT)
    assert outcome.code == 2
    assert outcome.err == (
        "kvjax: cannot write /dev/full: No space left on device; the answer is on standard output\n"
    )
    assert json.loads(outcome.out)["usage"]["generated"] == 6


def test_a_file_without_a_usable_row_decodes_nothing(decode, rows_file):
    outcome = decode("--prompts", rows_file("{", "}"), "--stats")
    assert outcome.code == 6
    assert len(outcome.out.splitlines()) == 2
    assert outcome.err.endswith("2 prompts, none decoded\n")


def test_the_figures_are_below_the_answer(decode):
    outcome = decode("-p", "hello", "--stats", *SHORT)
    prompt, times, cache = outcome.err.splitlines()
    assert prompt.startswith("prompt 10 tokens, ") and " generated 6 tokens, " in prompt
    assert prompt.endswith(" · length")
    for figure in ("first token ", "load ", "compile ", "prefill ", "peak memory "):
        assert figure in times
    assert cache.startswith("cache full: live 15 of 15 tokens · ")
    assert "\n" not in outcome.out.rstrip("\n")


def test_a_plan_needs_no_weights(decode, model, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    outcome = decode("--plan", "-p", "hello", "--batch-size", "1", model=tmp_path)
    assert (outcome.code, outcome.err) == (0, "")
    lines = dict(line.split("  ", 1) for line in outcome.out.splitlines())
    assert lines["method"].strip() == "full"
    assert lines["tokens a row"].strip() == str(16 + 256)


def test_a_plan_that_does_not_fit_says_what_would_help(decode):
    outcome = decode("--plan", "--max-new-tokens", 1 << 15, "--batch-size", 1_000_000)
    assert outcome.code == 4
    assert "pass --batch-size" in outcome.err and "rows" in outcome.out


@pytest.mark.parametrize("plan", [True, False])
def test_what_is_less_than_was_asked_for_is_said(decode, rows_file, monkeypatch, plan):
    monkeypatch.setattr(kvjax, "stream", lambda *_, **__: iter(()))
    path = rows_file('{"prompt": "hello"}', '{"prompt": "who"}', "{")
    argv = ["--prompts", path, *(["--plan"] if plan else [])]
    context, prompt = 1 << 16, 10
    too_many = ("--batch-size", 9, "--max-new-tokens", context - prompt + 1)
    assert decode(*argv, *too_many).err.splitlines()[:2] == [
        f"kvjax: --max-new-tokens {context - prompt + 1}: the model's context of {context} tokens "
        f"leaves {context - prompt} beside the longest prompt",
        "kvjax: --batch-size 9: there are 2 prompts",
    ]
    assert "kvjax: --" not in decode(*argv, *too_many, "--quiet").err
    assert "kvjax: --" not in decode(*argv, *too_many[:1], 2, *too_many[2:3], context - prompt).err
    assert "kvjax: --" not in decode(*argv, *SHORT).err


@pytest.mark.parametrize("option", ["--model", "--tokenizer", "--compare-text", "--output"])
def test_an_empty_value_is_not_taken_for_the_default(decode, option):
    outcome = decode("-p", "a", option, "", model=None)
    assert outcome.code == 2 and outcome.err.startswith(f"kvjax: {option} is empty")


@pytest.mark.parametrize(
    ("argv", "stdin", "code", "message"),
    [
        ([], b"", 2, "no prompt: give --prompt, --prompt-file or --prompts"),
        (["-p", ""], b"", 2, "--prompt is empty"),
        (["-p", "-"], b"", 2, "--prompt: standard input is empty"),
        (["-p", "-"], b"ab\xffc", 2, "--prompt: standard input is not UTF-8: byte 2 is 0xff"),
        (["--prompt-file", "no/such"], b"", 2, "--prompt-file: cannot read no/such: No such file"),
        (["--prompts", "."], b"", 2, "--prompts: cannot read .: Is a directory"),
        (["-p", "a", "-o", "no/such/out"], b"", 2, "--output: cannot write no/such/out: No such"),
        (["-p", "a", "--revision", "x"], b"", 2, "revision 'x' only applies to hub ids"),
        (["-p", "a" * (1 << 17)], b"", 4, "shorten the prompt by at least"),
        (["-p", "a", "--thinking", "on"], b"", 2, "thinking cannot be turned on"),
        (["-p", "a", "--tokenizer", "no/such"], b"", 3, "no/such"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_a_code(decode, argv, stdin, code, message):
    outcome = decode(*argv, stdin=stdin)
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.startswith("kvjax: ") and outcome.err.count("\n") == 1
    assert message in outcome.err


@pytest.mark.parametrize(
    ("name", "message"), [("missing", "no such file or directory"), ("empty", "config.json")]
)
def test_a_model_that_is_not_there_is_code_3(decode, tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    outcome = decode("-p", "a", model=tmp_path / name)
    assert (outcome.code, outcome.out) == (3, "")
    assert message in outcome.err and outcome.err.count("\n") == 1


def test_a_directory_without_weights_is_code_3(decode, model, tmp_path):
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    outcome = decode("-p", "a", model=tmp_path)
    assert outcome.code == 3
    assert "safetensors" in outcome.err and outcome.err.count("\n") == 1


def test_without_a_model_the_demo_model_is_named(decode, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    outcome = decode("-p", "a", model=None)
    assert outcome.code == 3
    assert "python -m kvjax.fetch_model smollm2" in outcome.err
    assert outcome.err.count("\n") == 1


def test_what_can_be_refused_is_refused_before_weights_load(decode, monkeypatch):
    monkeypatch.setattr(kvjax, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    for argv in (["-p", ""], ["-p", "a", "-o", "no/such/out"], ["--prompts", "no/such"]):
        assert decode(*argv).code == 2


def test_a_failed_run_leaves_the_old_output(decode, tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    assert decode("-p", "a" * (1 << 17), "-o", path, "--format", "json").code == 4
    assert path.read_text() == "old"
    assert decode("-p", "a", "-o", path, "--format", "json", *SHORT).code == 0
    assert json.loads(path.read_text())["usage"]["generated"] == 6


def test_verbose_shows_where_an_error_came_from(decode):
    outcome = decode("-p", "", "--verbose")
    assert outcome.code == 2
    assert "Traceback" in outcome.err and "kvjax: --prompt is empty" in outcome.err


def test_a_bug_is_one_line_too(decode, monkeypatch):
    def broken(*_, **__):
        raise TypeError("first line\nsecond line")

    monkeypatch.setattr(kvjax, "load", broken)
    outcome = decode("-p", "a")
    assert outcome.code == 1
    assert outcome.err == "kvjax: unexpected TypeError: first line (--verbose shows where)\n"


def test_out_of_memory_says_what_would_help(decode, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")

    monkeypatch.setattr(kvjax, "load", full)
    outcome = decode("-p", "a")
    assert outcome.code == 4
    assert "--batch-size" in outcome.err


def test_an_interrupt_while_loading_keeps_quiet(decode, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(kvjax, "load", interrupted)
    outcome = decode("-p", "a")
    assert (outcome.code, outcome.err) == (130, "kvjax: interrupted\n")
