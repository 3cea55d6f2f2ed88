"""Texts that end an answer."""

import dataclasses
import json
import random

import jax.numpy as jnp
import pytest
from flax import nnx

import kvjax
from kvjax.decoding.requests import Options, Request
from kvjax.decoding.row import Row
from kvjax.recipes import full
from tests.cli.conftest import END
from tests.decoding import small

NEW = ("--max-new-tokens", "40")


class Pieces:
    """A tokenizer and detokenizer whose token ``i`` is the ``i``-th of some pieces."""

    def __init__(self, pieces: list[str], last: str = ""):
        self.pieces, self.last = pieces, last

    def thinking_open(self, ids) -> bool:
        return False

    def detokenizer(self) -> "Pieces":
        return self

    def push(self, ids) -> str:
        return "".join(self.pieces[i] for i in ids)

    def flush(self) -> str:
        last, self.last = self.last, ""
        return last


def row_of(pieces: list[str], stops: tuple[str, ...], last: str = "", max_new: int = 1000) -> Row:
    options = Options(
        recipe=full(),
        max_new_tokens=max_new,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        batch_size=1,
        chunk=16,
        system_prompt=None,
        chat=True,
        thinking=None,
        repetition_stop=False,
        stop_ids=(),
        stop_texts=stops,
    )
    lm = dataclasses.replace(small.lm(), tokenizer=Pieces(pieces, last))
    return Row(lm, Request(0, (0,), max_new, False), options)


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, int | None]:
    """The text before the first stop text to be complete, and where that ends: the slow way."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))], end
    return text, None


def random_case(rng: random.Random):
    text = "".join(rng.choice("ab") for _ in range(rng.randint(0, 24)))
    stops = tuple("".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3)))
    pieces = []
    while len("".join(pieces)) < len(text):
        at = len("".join(pieces))
        pieces.append(text[at : at + rng.randint(0, 4)])
    return text, stops, pieces


def test_any_text_in_any_pieces_ends_before_the_first_stop_text():
    rng = random.Random(0)
    stopped = 0
    for _ in range(2000):
        text, stops, pieces = random_case(rng)
        expected, end = cut(text, stops)
        row, streamed, at = row_of(pieces, stops), "", 0
        while at < len(pieces) and row.finish is None:
            count = rng.randint(1, 5)
            new, taken = row.push(range(at, min(at + count, len(pieces))))
            streamed += new
            at += len(taken)
            assert expected.startswith(streamed)
        if row.finish is None:
            streamed += row.end("length")
        assert streamed == "".join(row.pieces) == expected == row.split()[0]
        assert (row.finish == "stop") == (end is not None)
        if end is not None:
            stopped += 1
            used = len("".join(pieces[: len(row.tokens)]))
            assert used >= end > used - len(pieces[len(row.tokens) - 1])
    assert 500 < stopped < 1900


def test_what_may_become_a_stop_text_is_held_back():
    row = row_of(["one ", "E", "N", "x", " EN", "D", "!"], ("END",))
    assert [row.push([i])[0] for i in range(5)] == ["one ", "", "", "ENx", " "]
    assert row.push([5, 6]) == ("", (5,))
    assert row.finish == "stop"
    assert row.split() == ("one ENx ", None)


def test_what_was_held_back_comes_when_the_row_ends_otherwise():
    row = row_of(["one ", "EN"], ("END",))
    row.push([0, 1])
    assert row.end("interrupted") == "EN"
    row = row_of(["one ", "EN"], ("END",), max_new=2)
    assert row.push([0, 1])[0] == "one EN" and row.finish == "length"


def test_a_stop_text_that_the_last_characters_complete():
    row = row_of(["one EN"], ("END",), last="D.", max_new=1)
    assert row.push([0])[0] == "one " == "".join(row.pieces)
    assert row.finish == "stop"


def test_a_stop_text_counts_in_the_thinking_block():
    row = row_of(["<think>", "hm", " so", "</think>", "yes"], ("m s",))
    assert row.push(range(5))[0] == "<think>h"
    assert row.split() == ("", "h")
    assert row.think_tokens == 3


@pytest.fixture(scope="module")
def answered(model):
    """The text of the small model, one token a character."""
    lm = kvjax.load(model)
    return kvjax.generate(lm, ["hello"], max_new_tokens=40, batch_size=1)[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_a_text_that_crosses_tokens_and_chunks(decode, answered, stream):
    # The prompt gives the first token, and a chunk has 16.
    stop = answered[15:20]
    at = answered.index(stop)
    if stream:
        outcome = decode("-p", "hello", *NEW, "--stop", stop, "--stream")
        assert outcome.out == answered[:at] + "\n"
        return
    outcome = decode(
        "-p", "hello", *NEW, "--stop", "never there", "--stop", stop, "--format", "json"
    )
    record = json.loads(outcome.out)
    assert record["text"] == answered[:at]
    assert record["finish_reason"] == "stop"
    assert record["usage"]["generated"] == at + 5
    assert record["run"]["stop_texts"] == ["never there", stop]


def test_a_stop_text_needs_a_tokenizer():
    with pytest.raises(kvjax.UsageError, match="stop_texts need a tokenizer"):
        kvjax.generate(small.lm(), [[1, 2]], stop_texts=["a"])


def test_a_stop_text_is_not_empty(decode):
    with pytest.raises(kvjax.UsageError, match="stop_texts must be texts, none empty"):
        row_of([], ("a", ""))
    outcome = decode("-p", "a", "--stop", "")
    assert (outcome.code, outcome.err) == (2, "kvjax: --stop must not be empty\n")


def test_the_name_of_a_special_token_ends_an_answer_at_that_token(decode, model, monkeypatch):
    """No text shows the token, so that the name alone would be looked for in vain."""
    lm = kvjax.load(model)
    prompt = set(lm.tokenizer.encode_chat([{"role": "user", "content": "hello"}]))
    [free] = kvjax.generate(lm, ["hello"], max_new_tokens=40, batch_size=1)
    third = next(token for token in free.tokens[2:] if token not in prompt)
    # That token gets the id of the special one, whose name is END.
    swapped = jnp.asarray([95 if i == third else third if i == 95 else i for i in range(96)])

    def renumber(decoder):
        for table in ("embed", "lm_head"):
            old = getattr(decoder, table)[...]
            setattr(decoder, table, nnx.Param(old[swapped]))

    lm = small.changed(lm, renumber)
    monkeypatch.setattr(kvjax, "load", lambda *_, **__: lm)
    at = free.tokens.index(third)
    assert 0 < at < 39 and 95 not in free.tokens
    for stop, reason in (("never there", "length"), (END, "stop")):
        argv = ("-p", "hello", *NEW, "--stop", stop, "--format", "json")
        record = json.loads(decode(*argv).out)
        assert record["finish_reason"] == reason
        assert record["run"]["stop_texts"] == [stop]
        if reason == "stop":
            assert record["usage"]["generated"] == at + 1


def test_a_stop_text_with_a_special_token_in_it_is_refused(decode):
    outcome = decode("-p", "a", "--stop", f"yes{END}")
    assert outcome.code == 2
    assert outcome.err.startswith(f"kvjax: --stop: 'yes{END}' would never be found")
    assert f"the special token '{END}': pass that alone" in outcome.err
