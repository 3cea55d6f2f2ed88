"""Prompts from a flag, a text file or a file of JSON lines."""

import dataclasses
import json
from typing import Any

from kvjax.command.files import as_text, read_bytes, read_text
from kvjax.errors import UsageError

Prompt = str | list[dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One prompt of a run.

    Attributes:
        id: what its record is called: the file's own, else its line number, or "line N" where
            another row has the number for its own.
        prompt: a text, or the messages of a chat; None for a line that could not be used.
        error: what is wrong with that line.
        answer: the text that follows the prompt, of rows read with answers.
    """

    id: str | int | None
    prompt: Prompt | None = None
    error: str | None = None
    answer: str | None = None


def text_row(text: str, source: str) -> Row:
    """The only row of a run that is given one text.

    Raises:
        UsageError: there is nothing in it, or it is not UTF-8.
    """
    if not text.strip():
        raise UsageError(f"{source} is empty: a prompt needs at least one word")
    if not _encodable(text):
        raise UsageError(f"{source} is not UTF-8")
    return Row(1, text)


def read_prompt(path: str, flag: str) -> Row:
    """A text file (``-`` is standard input) as one row, less the newline at its end."""
    text = read_text(path, flag)
    name = "standard input" if path == "-" else path
    return text_row(text.removesuffix("\n").removesuffix("\r"), f"{flag}: {name}")


def read_rows(path: str, flag: str = "--prompts", *, answers: bool = False) -> list[Row]:
    """The rows of a file of JSON lines, blank lines left out.

    A line is an object with a ``prompt`` (text) or ``messages`` (a chat) and perhaps an ``id``;
    other keys are the file's own business. A line that cannot be used becomes a row with an error,
    so that it does not take the others down.

    Args:
        path: the file; ``-`` is standard input.
        flag: what named it, for messages.
        answers: a line has an ``answer`` (text) as well.

    Raises:
        UsageError: the file cannot be read or has no line.
    """
    lines = read_bytes(path, flag).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    rows = {n: _row(n, line, answers) for n, line in enumerate(lines, start=1) if line.strip()}
    if not rows:
        raise UsageError(f"{flag}: {path} has no lines")
    given = {str(row.id) for row in rows.values() if row.id is not None}
    return [
        row if row.id is not None else dataclasses.replace(row, id=_free_id(number, given))
        for number, row in rows.items()
    ]


def _free_id(number: int, given: set[str]) -> str | int:
    """A name for the row of a line that has none of its own."""
    name: str | int = number
    while str(name) in given:
        name = f"line {name}"
    return name


def _row(number: int, line: bytes, answers: bool) -> Row:
    """The row of a line; its id is None where the line has none that could be used."""
    name: str | int | None = None
    try:
        record = json.loads(as_text(line, "the line"))
        if not isinstance(record, dict):
            raise UsageError(f"a line must be a JSON object, got {type(record).__name__}")
        name = _id(record) if "id" in record else None
        return Row(name, _prompt(record), answer=_answer(record) if answers else None)
    except (UsageError, ValueError, RecursionError) as error:
        return Row(name, error=f"line {number}: {error}")


def _id(record: dict[str, Any]) -> str | int:
    name = record["id"]
    if type(name) not in (str, int):
        raise UsageError(f"`id` must be text or a whole number, got {name!r}")
    if not _encodable(str(name)):
        raise UsageError("`id` has half a surrogate pair, which no UTF-8 can hold")
    return name


def _prompt(record: dict[str, Any]) -> Prompt:
    if ("prompt" in record) == ("messages" in record):
        raise UsageError("a line needs either `prompt` or `messages`")
    prompt = record.get("prompt", record.get("messages"))
    if "messages" in record:
        _check_messages(prompt)
    elif not isinstance(prompt, str):
        raise UsageError(f"`prompt` must be text, got {type(prompt).__name__}")
    elif not prompt.strip():
        raise UsageError("`prompt` is empty")
    if not _encodable(json.dumps(prompt, ensure_ascii=False)):
        raise UsageError("the text has half a surrogate pair, which no UTF-8 can hold")
    return prompt


def _answer(record: dict[str, Any]) -> str:
    answer = record.get("answer")
    if not isinstance(answer, str) or not answer.strip():
        raise UsageError(f"`answer` must be text that is not empty, got {answer!r:.80}")
    if not _encodable(answer):
        raise UsageError("`answer` has half a surrogate pair, which no UTF-8 can hold")
    return answer


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise UsageError("`messages` must be a list of at least one message")
    for message in messages:
        texts = isinstance(message, dict) and [message.get("role"), message.get("content")]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise UsageError("a message must be an object with the texts `role` and `content`")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
