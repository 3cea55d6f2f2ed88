"""From tokens to text: streamed pieces, what is held back, and the thinking block."""

import dataclasses

import pytest

import kvjax
from kvjax.decoding.conversation import Conversation
from kvjax.decoding.requests import Options, Request
from kvjax.decoding.row import Row
from tests.decoding import small
from tests.decoding.conftest import BYTES, END
from tests.decoding.small import NEW, SAMPLED, prompts, usual
from tests.test_tokenizer import CHATML, R1, make

HALF = {index for index, byte in enumerate(BYTES) if byte >= 0x80}


def stream(lm, inputs, **options) -> list[kvjax.Event]:
    shapes = {
        "recipe": kvjax.recipes.full(small.PAGE),
        "max_new_tokens": NEW,
        "batch_size": small.ROWS,
        "chunk": small.CHUNK,
    }
    return list(kvjax.stream(lm, inputs, **(shapes | options)))


def joined(events, row: int) -> tuple[str, tuple[int, ...]]:
    mine = [event for event in events if event.kind == "text" and event.row == row]
    return "".join(e.text for e in mine), tuple(t for e in mine for t in e.tokens)


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_pieces_join_to_the_text(text_lm, settings):
    events = stream(text_lm, prompts(), **settings)
    results = {e.row: e.result for e in events if e.kind == "done"}
    assert sorted(results) == [0, 1, 2, 3]
    for row, result in results.items():
        text, tokens = joined(events, row)
        assert tokens == result.tokens == usual(bool(settings))[row]
        assert text == result.text == text_lm.tokenizer.decode(result.tokens)
        assert result.reasoning is None
    assert any(HALF & set(result.tokens) for result in results.values())


def test_the_order_of_events(text_lm):
    events = stream(text_lm, prompts())
    assert [event.phase for event in events if event.kind == "phase"] == ["prefill", "decode"]
    assert events[0].phase == "prefill" and events[0].row is None
    decode = [event.phase for event in events].index("decode")
    assert [event.row for event in events[1:decode]] == [0, 1, 2, 3]
    assert all(len(event.tokens) == 1 for event in events[1:decode])
    for row in range(4):
        kinds = [event.kind for event in events if event.row == row]
        assert kinds == ["text"] * (len(kinds) - 1) + ["done"]
    sizes = [len(e.tokens) for e in events if e.kind == "text" and e.row == 0]
    assert sizes == [1, 8, 8, NEW - 17]


def test_the_stop_token_is_a_token_and_no_text(text_lm):
    stop = next(t for t in usual()[1][4:] if t not in usual()[1][:4] and t not in HALF)
    at = usual()[1].index(stop)
    events = stream(text_lm, prompts(), stop_ids=(stop,))
    result = next(e.result for e in events if e.kind == "done" and e.row == 1)
    text, tokens = joined(events, 1)
    assert tokens == result.tokens == usual()[1][: at + 1]
    assert text == result.text == text_lm.tokenizer.decode(usual()[1][:at])


def test_an_interrupted_row_gives_what_it_held_back(text_lm, tokenizer):
    """The last token is half a character: at the end it is shown as ``decode`` shows it."""
    row = row_of(text_lm, ids=tokenizer.encode("X"))
    emoji = tokenizer.encode("a😀")
    assert row.push(emoji[:-1]) == ("a", tuple(emoji[:-1]))
    assert row.end("interrupted") == tokenizer.decode(emoji[:-1])[1:] != ""
    assert row.split() == (tokenizer.decode(emoji[:-1]), None)
    assert row.finish == "interrupted"


def test_messages_strings_and_ids_ask_the_same(text_lm, tokenizer):
    text = "A TALE OF A HEN."
    chat = [{"role": "user", "content": text}]
    told = [{"role": "system", "content": "S"}, *chat]
    ids = tokenizer.encode(f"U:{text};A:")
    assert 16 < len(ids) <= 32
    answers = [r.tokens for r in small.decode([text, chat, ids, told], text_lm)]
    assert answers[0] == answers[1] == answers[2] != answers[3]
    plain = tokenizer.encode(text)
    raw = [r.tokens for r in small.decode([text, plain, plain, ids], text_lm, chat=False)]
    assert raw[0] == raw[1] != answers[0] == raw[3]
    system = small.decode([text, told, text, told], text_lm, system_prompt="AB")
    lengths = [result.prompt_tokens for result in system[:2]]
    assert lengths == [len(ids) + 5, len(ids) + 4], "its own system message stands"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        ([{"role": "user"}], "must have"),
        ("a\ud800", "not valid Unicode"),
    ],
)
def test_prompts_that_are_none(text_lm, prompt, message):
    with pytest.raises(kvjax.UsageError, match=message):
        small.decode([prompt], text_lm)


def row_of(lm, ids, stop_ids=(), max_new=1000, truncated=False, past=None) -> Row:
    options = Options(
        recipe=kvjax.recipes.full(),
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
        repetition_stop=True,
        stop_ids=stop_ids,
    )
    return Row(lm, Request(0, tuple(ids), max_new, truncated, past=past), options)


def thinker(template: str):
    """A row after a chat prompt; its tokenizer has whole tokens for the marks, and bytes."""
    tokenizer = make(template=template)
    lm = dataclasses.replace(small.lm(), tokenizer=tokenizer)
    return tokenizer, row_of(lm, tokenizer.encode_chat([{"role": "user", "content": "q"}]))


def letters(text: str) -> list[int]:
    """Byte tokens, so that the marks are spelled out."""
    return [6 + byte for byte in text.encode()]


@pytest.mark.parametrize(
    ("template", "said", "answer", "reasoning", "thought"),
    [
        (CHATML, "<think>hm, so</think>\n\nyes", "yes", "hm, so", 8),
        (CHATML, "\n<think>\nhm\n</think> yes", "yes", "hm", 6),
        (R1, "hm, so\n</think>\n\nyes", "yes", "hm, so", 8),
        (R1, "<think>hm</think>yes", "yes", "hm", 4),
        (R1, "still at it", "", "still at it", 11),
        (CHATML, "<think>still at it", "", "still at it", 12),
        (CHATML, "yes", "yes", None, 0),
        (CHATML, "", "", None, 0),
        (CHATML, "<think></think>yes", "yes", "", 2),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_the_thinking_block(template, said, answer, reasoning, thought, at_once):
    tokenizer, row = thinker(template)
    ids = tokenizer.encode(said)
    pieces = [ids] if at_once else [[index] for index in ids]
    streamed = "".join(row.push(piece)[0] for piece in pieces) + row.end("length")
    assert streamed == said
    assert row.split() == (answer, reasoning)
    assert row.think_tokens == thought


@pytest.mark.parametrize(
    ("before", "after", "phase", "split"),
    [
        ("<think>hm", ", so</think>yes", "think", ("yes", ", so")),
        ("<think>hm", ", so", "think", ("", ", so")),
        ("<think>hm</think>", "yes", "answer", ("yes", None)),
        ("oh", " no", "answer", (" no", None)),
    ],
)
def test_an_answer_that_goes_on(before, after, phase, split):
    """What was said before is known, and is no text of what comes."""
    tokenizer, row = thinker(CHATML)
    said = tokenizer.encode(before)
    tokens = (*row.request.ids, *said)
    past = Conversation(tokens, len(said), kvjax.recipes.full(), "", "", "float32", {})
    lm = dataclasses.replace(small.lm(), tokenizer=tokenizer)
    row = row_of(lm, tokens, past=past)
    assert (row.phase, row.tokens, row.pieces) == (phase, [], [])
    text, _ = row.push(tokenizer.encode(after))
    assert text + row.end("length") == after
    assert row.split() == split


def test_marks_that_are_spelled_out():
    _, row = thinker(CHATML)
    row.push(letters("<think>hm</think> yes"))
    row.end("length")
    assert row.split() == ("yes", "hm")
    assert row.think_tokens >= len("hm</think>")


def test_a_mark_inside_an_answer_is_text():
    """A thinking block opens an answer; later on, the mark is only spoken of."""
    said = "Some models write <think> first."
    tokenizer, row = thinker(CHATML)
    row.push(tokenizer.encode(said))
    row.end("length")
    assert row.split() == (said, None)
    assert row.think_tokens == 0


def test_a_second_block_belongs_to_the_answer():
    said = "<think>a</think>b <think>c</think>d"
    tokenizer, row = thinker(CHATML)
    row.push(tokenizer.encode(said))
    row.end("length")
    assert row.split() == ("b <think>c</think>d", "a")
    assert row.think_tokens == 3


def test_nothing_is_taken_after_the_end(text_lm, tokenizer):
    row = row_of(text_lm, tokenizer.encode("X"), stop_ids=(END, 3), max_new=5)
    ids = tokenizer.encode("abcdefg")
    assert row.push([*ids[:2], 3, *ids[2:]]) == ("ab", (*ids[:2], 3))
    assert row.finish == "stop" and row.push(ids) == ("", ())
    row = row_of(text_lm, tokenizer.encode("X"), max_new=5, truncated=True)
    assert row.push(ids) == ("abcde", tuple(ids[:5]))
    assert row.finish == "cache_full"


def test_without_a_tokenizer_there_are_tokens_only():
    row = row_of(small.lm(), [1, 2])
    assert row.push([3, 4]) == ("", (3, 4))
    assert row.end("interrupted") == ""
    assert row.split() == ("", None)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("prompts", ["Say hi", [1, 2, 3], [None], [["a"], 7]])
def test_a_bare_prompt_is_refused_and_not_taken_apart(prompts):
    with pytest.raises(kvjax.UsageError, match=r"prompts must be a list .* into a list"):
        kvjax.generate(small.lm(), prompts)
    with pytest.raises(kvjax.UsageError, match=r"must be a list of them"):
        kvjax.generate(small.lm(), [{"role": "user", "content": "hi"}])
