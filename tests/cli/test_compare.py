"""``--compare full``."""

import json
import pathlib
import shutil
import types

import pytest

import kvjax
from kvjax.command import quality
from kvjax.command.decode_options import DecodeConfig
from kvjax.decoding.events import Event
from kvjax.models.forward import check_tokens
from tests.cli.conftest import save_tokenizer

COMPARE = ("--compare", "full", "--max-new-tokens", 6)
CONTEXT = 1 << 16


@pytest.fixture
def rows(tmp_path):
    """A file of prompts of so many tokens, template included."""

    def write(*lengths: int) -> pathlib.Path:
        path = tmp_path / "rows.jsonl"
        prompts = ("h" * (length - len("u:|a:")) for length in lengths)
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        return path

    return write


@pytest.fixture
def text(tmp_path):
    """A file of so many tokens."""

    def write(length: int) -> pathlib.Path:
        path = tmp_path / "text.txt"
        path.write_text("t" * length)
        return path

    return write


@pytest.fixture
def unfed(monkeypatch):
    """Comparisons find nothing, and no cache is fed."""

    def compare(lm, tokens, **_):
        check_tokens(tokens, lm.config.vocab_size, lm.config.context_length)
        return types.SimpleNamespace(as_dict=lambda: {"kl_mean": 0.0}, rows=lambda: [("KL", "0")])

    monkeypatch.setattr(quality, "compare", compare)


@pytest.fixture
def answered(monkeypatch):
    """Every prompt is answered at once."""

    def stream(lm, prompts, **_):
        for row, _ in enumerate(prompts):
            yield Event("done", row=row, result=kvjax.Result("answer", (1,) * 6, "length", 10))

    monkeypatch.setattr(kvjax, "stream", stream)


def test_a_comparison_that_fails_leaves_the_answers(decode, rows, text, unfed, answered):
    """The text fits the context behind two prompts and not behind the one between them."""
    argv = ["--prompts", rows(10, 14, 10), *COMPARE, "--compare-text", text(CONTEXT - 13)]
    outcome = decode(*argv)
    assert outcome.code == 6
    records = [json.loads(line) for line in outcome.out.splitlines()]
    assert [record["id"] for record in records] == [1, 2, 3]
    assert [record["finish_reason"] for record in records] == ["length"] * 3
    first, failed, last = (record["quality"] for record in records)
    assert first == last == {"kl_mean": 0.0}
    assert list(failed) == ["error"] and str(CONTEXT) in failed["error"]
    assert outcome.err == (
        f"kvjax: 1 of 3 comparisons failed; the first has id 2: {failed['error']}\n"
    )


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_answer_outlives_its_comparison(decode, monkeypatch, form):
    """Also where something breaks that nobody thought of."""
    for error, code in ((kvjax.NumericalError("no number"), 6), (RuntimeError("a bug"), 1)):
        monkeypatch.setattr("kvjax.command.run.compared", _raise(error))
        outcome = decode("-p", "hello", *COMPARE, "--format", form)
        assert outcome.code == code and str(error) in outcome.err
        answer = json.loads(outcome.out)["text"] if form == "json" else outcome.out.strip("\n")
        assert len(answer) == 6


def _raise(error: Exception):
    def call(*_, **__):
        raise error

    return call


@pytest.mark.parametrize("method", ["full", "uniform"])
def test_a_text_that_fits_behind_no_prompt_is_refused_at_once(
    decode, rows, text, monkeypatch, method
):
    monkeypatch.setattr(kvjax, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    argv = (*COMPARE, "--method", method, "--compare-text", text(CONTEXT - 20 + 1))
    given = ("--prompts", rows(20, 30)), ("-p", "h" * (20 - len("u:|a:")))
    for prompts in given:
        outcome = decode(*prompts, *argv)
        assert (outcome.code, outcome.out) == (4, "")
        assert outcome.err.startswith(f"kvjax: --compare-text: the text has {CONTEXT - 19} tokens")
        assert f"leaves {CONTEXT - 20} behind a prompt of 20 tokens: shorten" in outcome.err
        assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("given", [True, False])
def test_a_comparison_is_made_as_the_run_is(decode, text, answered, monkeypatch, given, tmp_path):
    """Of its memory, with its kernel, until its interrupt, and without keeping a cache."""
    asked = []

    def generate(lm, prompts, **options):
        asked.append(options)
        return [kvjax.Result("answer", (1,) * 6, "length", 10)]

    def compare(lm, tokens, **options):
        asked.append(options)
        raise kvjax.UsageError("enough")

    monkeypatch.setattr(kvjax, "generate", generate)
    monkeypatch.setattr(quality, "compare", compare)
    argv = ["-p", "hello", *COMPARE, "--kernel", "xla", "--memory", "1GiB"]
    argv += ["--compare-text", text(20)] if given else ["--save-cache", tmp_path / "cache"]
    assert decode(*argv).code == 6
    assert len(asked) == 2 - given
    for options in asked:
        assert options["memory_bytes"] == 1 << 30 and options["kernel"] == "xla"
        assert options["should_stop"]() is False
    assert not asked[0].get("keep_cache")


@pytest.mark.parametrize("given", [True, False])
def test_what_no_comparison_has_the_memory_for_is_refused_at_once(decode, text, monkeypatch, given):
    monkeypatch.setattr(kvjax, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    argv = ["-p", "hello", "--memory", "1MiB", "--compare", "full"]
    if given:
        argv += ["--compare-text", text(3000), "--max-new-tokens", 6]
    else:
        argv += ["--method", "streaming", "--kv-budget", 64, "--max-new-tokens", 3000]
    outcome = decode(*argv)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (4, "", 1)
    what = "the text" if given else "the answer without compression"
    assert outcome.err.startswith(f"kvjax: --compare full: {what}: 1 row of 3016 tokens need")
    advice = "a shorter text" if given else "a --compare-text"
    assert outcome.err.endswith(f"or {advice}\n")


def test_no_beginning_of_sequence_stands_before_a_given_answer(model, tmp_path, monkeypatch):
    for name in ("model.safetensors", "config.json"):
        shutil.copy(model / name, tmp_path)
    save_tokenizer(tmp_path, begins=True)
    lm = kvjax.load(tmp_path)
    begin = lm.tokenizer.bos_id
    assert begin is not None and lm.tokenizer.encode("ab")[0] == begin
    monkeypatch.setattr(quality, "compare", lambda lm, tokens, **_: tokens)
    config = DecodeConfig(compare="full", compare_text="x", chat_template=False)
    ids = quality.compared(lm, "ab", kvjax.recipes.full(), config, "cd")
    assert ids == [begin, *(ord(letter) - 32 for letter in "abcd")]
