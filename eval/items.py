"""Items of multiple choice, and texts to complete, from the formats in which people have them."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from kvjax.errors import UsageError
from kvjax.eval.lines import check_once, numbered_lines
from kvjax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Item:
    """One question and what may answer it; with one choice alone, a text to complete.

    Attributes:
        id: names it within its task.
        contexts: what each choice follows; most often the same text for all.
        continuations: what is scored.
        choices: the choices themselves, whose characters normalise a score.
        gold: index of the right one.
    """

    id: str
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    choices: tuple[str, ...]
    gold: int


def read_items(path: pathlib.Path, count: int | None, first: int) -> list[Item]:
    """Items of a file of JSON lines, each of one of these forms.

    - ARC, OpenBookQA: ``question`` or ``question_stem``, ``choices`` with ``text`` and ``label``,
      ``answerKey``
    - PIQA: ``goal``, ``sol1``, ``sol2``, ``label``
    - HellaSwag: ``activity_label``, ``ctx_a``, ``ctx_b``, ``endings``, ``label``
    - WinoGrande: ``sentence`` with a ``_``, ``option1``, ``option2``, ``answer``: what is scored is
      the text behind the gap, with either option in it
    - LAMBADA: ``context``, ``target``: the one choice
    - any other: ``context``, ``choices``, ``gold`` (an index)

    Raises:
        UsageError: the file cannot be read, or a line is of no such form.
    """
    lines = numbered_lines(path)
    items = []
    for index, (number, line) in list(enumerate(lines))[first:][:count]:
        try:
            record = json.loads(line)
            found = _item(record, str(record.get("id", record.get("ind", index))))
            if found is None:
                raise ValueError("its keys are of no form that is known")
            fewest = 1 if "target" in record else 2
            if not 0 <= found.gold < len(found.choices) or len(found.choices) < fewest:
                raise ValueError(f"its {len(found.choices)} choices have no number {found.gold}")
            if not all(found.continuations) or not all(found.contexts):
                raise ValueError("a text is empty")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
        items.append(found)
    if not items:
        raise UsageError(f"--tasks: {path} has {len(lines)} lines, and none from number {first} on")
    check_once(path, [item.id for item in items], "items with the id")
    return items


def _item(record: dict[str, Any], name: str) -> Item | None:
    if "answerKey" in record:
        question = record.get("question", record.get("question_stem"))
        gold = record["choices"]["label"].index(record["answerKey"])
        return _alike(name, f"Question: {question}\nAnswer:", record["choices"]["text"], gold)
    if "goal" in record:
        choices = [record["sol1"], record["sol2"]]
        return _alike(name, f"Question: {record['goal']}\nAnswer:", choices, int(record["label"]))
    if "endings" in record:
        start = f"{record['ctx_a']} {record['ctx_b'].capitalize()}"
        context = _plain(f"{record['activity_label']}: {start}")
        return _alike(name, context, map(_plain, record["endings"]), int(record["label"]))
    if "sentence" in record:
        before, _, after = record["sentence"].partition("_")
        options = (record["option1"], record["option2"])
        contexts = tuple((before + option).strip() for option in options)
        rest = " " + after.strip()
        return Item(name, contexts, (rest, rest), options, int(record["answer"]) - 1)
    if "target" in record:
        return _alike(name, record["context"], [record["target"].strip()], 0)
    if "context" in record:
        return _alike(name, record["context"], record["choices"], int(record["gold"]))
    return None


def _alike(name: str, context: str, choices: Sequence[str], gold: int) -> Item:
    choices = tuple(choices)
    continuations = tuple(f" {choice}" if choice else "" for choice in choices)
    return Item(name, (context.strip(),) * len(choices), continuations, choices, gold)


def _plain(text: str) -> str:
    """HellaSwag's texts without the marks of the web pages that they are from."""
    text = text.strip().replace(" [title]", ". ")
    return " ".join(re.sub(r"\[.*?\]", "", text).split())


def split(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Tokens of a context and of what follows it, as they are when both are one text.

    A token that holds the end of the one and the beginning of the other belongs to the latter.
    """
    whole, alone = tokenizer.encode(context + continuation), tokenizer.encode(context)
    count = 0
    while count < min(len(alone), len(whole) - 1) and whole[count] == alone[count]:
        count += 1
    return whole[:count], whole[count:]
