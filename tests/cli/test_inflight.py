"""Several answers a prompt, and prompts that wait for memory."""

import json

import pytest

from kvjax import recipes
from kvjax.command.decode_options import DecodeConfig
from kvjax.command.outline import outline
from kvjax.command.prompts import Row

SHORT = ("--max-new-tokens", 6)
HOT = ("--temperature", 1.5)
PROMPTS = ("hello", "who")


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": p, "prompt": p}) + "\n" for p in PROMPTS) + "{\n")
    return str(path)


def records(outcome) -> list[dict]:
    return [json.loads(line) for line in outcome.out.splitlines()]


def test_samples_in_the_order_of_the_file(decode, prompts):
    outcome = decode("--prompts", prompts, "-n", 3, "--batch-size", 2, *HOT, *SHORT)
    assert outcome.code == 6  # for the line that is none
    found = records(outcome)
    names = [(record["id"], record["sample"]) for record in found]
    assert names == [(name, sample) for name in (*PROMPTS, 3) for sample in range(3)]
    assert "3 of 9 answers failed; the first has id 3" in outcome.err
    texts = [record["text"] for record in found[:6]]
    assert len(set(texts)) == 6
    alone = records(decode("--prompts", prompts, "--batch-size", 2, *HOT, *SHORT))
    assert [record["text"] for record in alone[:2]] == texts[::3]
    assert "sample" not in alone[0] and found[0]["run"]["samples"] == 3


def test_samples_of_one_prompt(decode):
    argv = ("--samples", 2, "--batch-size", 2, *HOT, *SHORT, "--stats", "--format", "json")
    outcome = decode("-p", "hello", *argv)
    assert [record["sample"] for record in json.loads(outcome.out)] == [0, 1]
    assert "1 prompts, 10 tokens · generated 12 tokens" in outcome.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--greedy",), "--samples 2 of greedy decoding are all alike"),
        (("--temperature", 0), "--samples 2 of greedy decoding are all alike"),
        ((), "--samples 2 of greedy decoding are all alike"),
        ((*HOT, "--compare", "full"), "--compare is for one answer: leave it out with --samples"),
        ((*HOT, "--trace", "a.png"), "--trace is for one answer"),
        ((*HOT, "--stream"), "--stream is for one answer"),
    ],
)
def test_what_does_not_go_with_samples(decode, argv, message):
    outcome = decode("-p", "hello", "-n", 2, *SHORT, *argv)
    assert outcome.code == 2 and message in outcome.err


def little_memory(model, prompt: str) -> int:
    """Enough for one such row at a time, and for the tables of a few."""
    config = DecodeConfig(model=str(model), max_new_tokens=6, page_size=16)
    planned = outline(config, [Row(1, prompt)]).plan(recipes.full(16))
    return planned.nbytes + planned.geometry.row_bytes // 2


@pytest.mark.slow
def test_a_prompt_waits_for_memory_and_one_that_can_never_fit_is_refused(decode, model, tmp_path):
    path = tmp_path / "rows.jsonl"
    texts = ["hello there " * 4, "who", "why " * 500, "hello"]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    argv = ("--prompts", path, "--page-size", 16, "--batch-size", 3, *SHORT)
    free = records(decode(*argv))
    little = ("--memory", little_memory(model, texts[0]))
    plan = decode(*argv, *little, "--plan")
    assert plan.code == 0 and "1; more where they are shorter" in plan.out
    outcome = decode(*argv, *little)
    assert "--batch-size 3: the memory holds 1 rows of 70 tokens at once, and" in outcome.err
    found = records(outcome)
    assert outcome.code == 6 and "1 of 4 prompts failed" in outcome.err
    assert [record["finish_reason"] for record in found] == ["length", "length", "error", "length"]
    assert "1 row of 2054 tokens need" in found[2]["error"]
    for kept, was in zip(found, free, strict=True):
        assert "error" in kept or kept["text"] == was["text"]
