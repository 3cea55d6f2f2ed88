"""Reasoning traces whose kinds of thought somebody knows: the reasoner's, and labelled ones."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from kvjax.errors import UsageError
from kvjax.loading import LanguageModel
from kvjax.thoughts import KINDS
from kvjax.tokenizer import Tokenizer
from kvjax.train.reasoner import task, vocabulary

UNKNOWN = -1
REASONER = {task.REASONING: "R", task.EXECUTION: "E", task.TRANSITION: "T", task.ANSWER: "E"}
TAGS = {
    "problem_setup": "R",
    "plan_generation": "R",
    "fact_retrieval": "R",
    "active_computation": "E",
    "result_consolidation": "E",
    "final_answer_emission": "E",
    "uncertainty_management": "T",
    "self_checking": "T",
}
"""ThinKV's kind (arXiv 2510.01290, section 4.1) for the function that Thought Anchors gives a
sentence: the mapping is ours."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """One answer.

    Attributes:
        name: of the problem.
        prompt: token ids.
        answer: token ids.
        kinds: of each token of the answer, an index into `KINDS`, or `UNKNOWN`.
        units: of each token, the number of its paragraph or sentence, rising.
    """

    name: str
    prompt: list[int]
    answer: list[int]
    kinds: Int[np.ndarray, " N"]
    units: Int[np.ndarray, " N"]

    def borders(self) -> Int[np.ndarray, " M"]:
        """The first token of every unit whose kind is another than that of the unit before."""
        starts = 1 + np.flatnonzero(np.diff(self.units))
        before, after = self.kinds[starts - 1], self.kinds[starts]
        return starts[(before != after) & (before != UNKNOWN) & (after != UNKNOWN)]


def of_reasoner(level: int, count: int) -> Iterator[Trace]:
    """Problems that the reasoner was never trained on, with their reference traces."""
    for index in range(count):
        found = task.problem(level, index, split="validation")
        tokens, answer = list(found.tokens), slice(found.prompt, None)
        kinds = [KINDS.index(REASONER[kind]) for kind in found.kinds[answer]]
        breaks = np.array(tokens[answer]) == vocabulary.BREAK
        units = np.cumsum(breaks, dtype=np.int32)
        name = f"reasoner {level}/{index}"
        yield Trace(name, tokens[: found.prompt], tokens[answer], np.array(kinds), units)


def of_file(path: pathlib.Path, lm: LanguageModel, tokens: int) -> Iterator[Trace]:
    """Traces of a Thought Anchors file, in a model's tokens.

    Args:
        path: JSON lines with ``id``, ``prompt``, ``solution`` and ``chunks``, the sentences, each
            with its ``chunk`` of the text and ``function_tags``.
        lm: whose tokenizer reads them.
        tokens: of prompt and answer at most; what is beyond is cut off.

    Raises:
        UsageError: the file cannot be read, or is none of these.
    """
    encode = lm.tokenizer.encode
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        records = [json.loads(line) for line in lines if line.strip()]
        for record in records:
            sentences = [(one["chunk"], one["function_tags"][0]) for one in record["chunks"]]
            name = f"{path.stem} {record['id']}"
            prompt = encode(record["prompt"])
            answer = encode(record["solution"], starts=False)[: max(tokens - len(prompt), 0)]
            kinds, units = _of_characters(record["solution"], sentences)
            first = _first_characters(lm.tokenizer, answer)
            yield Trace(name, prompt, answer, kinds[first], units[first])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UsageError(f"{path} has no labelled traces: {error!r}") from error


def _of_characters(
    text: str, sentences: list[tuple[str, str]]
) -> tuple[Int[np.ndarray, " C"], Int[np.ndarray, " C"]]:
    """Kind and unit of every character; what lies between two sentences is of the first."""
    kinds, units = np.full(len(text), UNKNOWN), np.zeros(len(text), int)
    at = 0
    for number, (sentence, tag) in enumerate(sentences, start=1):
        found = text.find(sentence, at)
        if found < 0:  # the label's text was normalised: its characters stay with those before
            continue
        kinds[found:], units[found:] = KINDS.index(TAGS[tag]), number
        at = found + len(sentence)
    return kinds, units


def _first_characters(tokenizer: Tokenizer, ids: list[int]) -> Int[np.ndarray, " N"]:
    """Of every token, the index of its first character that is not white space."""
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push([index]) for index in ids]
    lengths = np.array([len(piece) for piece in pieces])
    blank = np.array([len(piece) - len(piece.lstrip()) for piece in pieces])
    starts = np.cumsum(lengths) - lengths + np.where(blank < lengths, blank, 0)
    return np.minimum(starts, max(int(lengths.sum()) - 1, 0))
