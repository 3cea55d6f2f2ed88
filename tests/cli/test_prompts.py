"""Prompts as the user gives them."""

import pytest

from kvjax.command.prompts import read_prompt, read_rows, text_row
from kvjax.errors import UsageError


def write(tmp_path, content: bytes) -> str:
    path = tmp_path / "prompts"
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize("content", [b"a b", b"a b\n", b"a b\r\n", b"\xef\xbb\xbfa b\n"])
def test_a_text_file_is_a_prompt_without_its_last_line_break(tmp_path, content):
    assert read_prompt(write(tmp_path, content), "--prompt-file").prompt == "a b"


def test_a_text_that_is_no_utf8_names_the_byte(tmp_path):
    with pytest.raises(UsageError, match=r"is not UTF-8: byte 2 is 0xff"):
        read_prompt(write(tmp_path, b"ab\xff"), "--prompt-file")


@pytest.mark.parametrize("text", ["", " \n", "\udcff"])
def test_an_empty_or_undecodable_prompt_is_refused(text):
    with pytest.raises(UsageError, match=r"--prompt is (empty|not UTF-8)"):
        text_row(text, "--prompt")


def test_rows_keep_their_ids_or_take_their_line_number(tmp_path):
    lines = b'\xef\xbb\xbf{"id": "a", "prompt": "x"}\r\n\n{"prompt": "y", "answer": 4}\n'
    rows = read_rows(write(tmp_path, lines))
    assert [(row.id, row.prompt, row.error) for row in rows] == [("a", "x", None), (3, "y", None)]


def test_rows_may_be_chats(tmp_path):
    lines = b'{"messages": [{"role": "user", "content": "x"}]}'
    assert read_rows(write(tmp_path, lines))[0].prompt == [{"role": "user", "content": "x"}]


def test_a_line_number_is_no_other_row_s_id(tmp_path):
    lines = b'{"prompt": "a"}\n{"id": "1", "prompt": "b"}\n{\n{"id": 3, "prompt": "c"}\n'
    lines += b'{"prompt": "d"}\n{"id": "line 3", "prompt": "e"}\n{"id": [], "prompt": "f"}\n'
    rows = read_rows(write(tmp_path, lines))
    assert [row.id for row in rows] == ["line 1", "1", "line line 3", 3, 5, "line 3", 7]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "Expecting property name"),
        (b"[1]", "a line must be a JSON object, got list"),
        (b"{}", "needs either `prompt` or `messages`"),
        (b'{"prompt": "a", "messages": []}', "needs either `prompt` or `messages`"),
        (b'{"prompt": ""}', "`prompt` is empty"),
        (b'{"prompt": 5}', "`prompt` must be text, got int"),
        (b'{"messages": []}', "at least one message"),
        (b'{"messages": [{"role": "user"}]}', "the texts `role` and `content`"),
        (b'{"prompt": "\\ud800"}', "half a surrogate pair"),
        (b'{"prompt": "\xff"}', "is not UTF-8: byte 12 is 0xff"),
        (b'{"id": [1], "prompt": "a"}', "`id` must be text or a whole number"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_a_broken_line_is_an_error_of_its_row_alone(tmp_path, line, message):
    rows = read_rows(write(tmp_path, b'{"prompt": "x"}\n' + line + b'\n{"prompt": "y"}'))
    assert [row.prompt for row in rows] == ["x", None, "y"]
    assert rows[1].error.startswith("line 2: ") and message in rows[1].error


def test_a_file_without_lines_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has no lines"):
        read_rows(write(tmp_path, b"\n \n"))


def test_an_id_with_half_a_surrogate_pair_fails_its_row_only(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"id": "\\ud800", "prompt": "hello"}\n{"id": "b", "prompt": "hello"}\n')
    bad, good = read_rows(str(file))
    assert "surrogate" in bad.error and good.error is None
