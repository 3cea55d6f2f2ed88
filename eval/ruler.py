"""Prompts of files in the manner of RULER: long texts, and what an answer must contain."""

import json
import pathlib
from typing import Any

from kvjax.decoding import Result
from kvjax.errors import UsageError
from kvjax.eval.lines import check_once, numbered_lines
from kvjax.eval.problems import Group, Problem


def ruler_group(path: pathlib.Path, count: int, max_new_tokens: int) -> Group:
    """The first problems of a file of JSON lines with an ``input`` and a list of ``outputs``.

    Args:
        path: the file.
        count: how many of its lines.
        max_new_tokens: tokens that an answer may take.

    Raises:
        UsageError: the file cannot be read, or a line is of another form.
    """
    lines = numbered_lines(path)
    problems = []
    for index, (number, line) in enumerate(lines[:count]):
        try:
            record = json.loads(line)
            asked, outputs = record["input"], record["outputs"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
        texts = outputs if isinstance(outputs, list) else []
        if not texts or not all(isinstance(one, str) and one for one in [asked, *texts]):
            raise UsageError(
                f"{path}, line {number}: `input` must be a text, and `outputs` a list of texts"
            )
        problems.append(Problem(str(record.get("index", index)), asked, json.dumps(texts)))
    if not problems:
        raise UsageError(f"--tasks: {path} has no lines")
    check_once(path, [problem.id for problem in problems], "problems with the index")
    return Group(path.stem, problems, judge_all, max_new_tokens, max_new_tokens)


def judge_all(problem: Problem, result: Result) -> dict[str, Any]:
    """Right is an answer with all of the outputs in it, in whatever case (RULER's string match)."""
    wanted = json.loads(problem.gold)
    found = [text for text in wanted if text.lower() in result.text.lower()]
    return {"answer": ", ".join(found) or None, "right": len(found) == len(wanted)}
