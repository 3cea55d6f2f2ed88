"""Problems with one right answer each: of files, and of the reasoner."""

import dataclasses
import json
import pathlib
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from kvjax.decoding import Result
from kvjax.decoding.requests import Prompt
from kvjax.errors import UsageError
from kvjax.eval.grading import boxed, check_math_verify, equivalent
from kvjax.eval.lines import check_once, numbered_lines
from kvjax.train.reasoner import task as reasoner

FILES = {
    "gsm8k": "the 1,319 test problems of openai/grade-school-math, with `question` and `answer`",
    "math500": "the 500 problems of MATH-500, with `problem`, `answer` and `level`",
    "aime24": "the 30 problems of AIME 2024, with `problem` and `answer`",
    "aime25": "the 30 problems of AIME 2025, with `problem` and `answer`",
}
"""Tasks that are files, ``NAME/test.jsonl`` in the folder of data, and what these hold."""
_ASK = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclasses.dataclass(frozen=True)
class Problem:
    """One question.

    Attributes:
        id: names it within its group.
        prompt: what the model is asked.
        gold: the right answer.
        level: how hard it is, or how long, or whatever else its group is told apart by.
        answer: the tokens of an answer that is known to be right, if one is.
        depth: of what is to be found in a prompt, the share of the prompt before it.
    """

    id: str
    prompt: Prompt
    gold: str
    level: int | str | None = None
    answer: tuple[int, ...] | None = None
    depth: float | None = None


Judge = Callable[[Problem, Result], dict[str, Any]]
"""From an answer to ``right``, the ``answer`` as it was understood (None: there is none), and any
other figure."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Problems that are answered under the same recipes.

    Attributes:
        task: what they are from.
        problems: in the order in which they are asked.
        judge: what says whether an answer is right.
        answer_tokens: tokens that a recipe's share is a share of.
        max_new_tokens: tokens that an answer may take.
    """

    task: str
    problems: list[Problem]
    judge: Judge
    answer_tokens: int
    max_new_tokens: int


def file_group(name: str, path: pathlib.Path, count: int | None, first: int, limit: int) -> Group:
    """Problems of a file of JSON lines, answered in a box.

    A line has a ``prompt``, a ``problem`` or a ``question``, an ``answer`` (what is behind the last
    #### of it, if there is any) and perhaps an ``id`` and a ``level``.

    Args:
        name: of the task.
        path: the file.
        count: take so many lines; None: all.
        first: number of the first line to take, from 0.
        limit: tokens that an answer may take.

    Raises:
        UsageError: the file cannot be used, or math-verify is missing.
    """
    check_math_verify(f"--tasks {name}")
    lines = numbered_lines(path)
    problems = [
        _problem(line, f"{path}, line {number}", str(index))
        for index, (number, line) in enumerate(lines)
    ]
    problems = problems[first:][:count]
    if not problems:
        raise UsageError(f"--tasks: {path} has {len(lines)} lines, and none from number {first} on")
    check_once(path, [problem.id for problem in problems], "problems with the id")
    return Group(name, problems, judge_box, limit, limit)


def _problem(line: str, source: str, index: str) -> Problem:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source}: {error}") from error
    if not isinstance(record, dict):
        raise UsageError(f"{source} must be a JSON object")
    asked = [record[key] for key in ("prompt", "problem", "question") if key in record]
    if len(asked) != 1 or not isinstance(asked[0], str) or not asked[0].strip():
        raise UsageError(f"{source} needs one text: a `prompt`, a `problem` or a `question`")
    gold = str(record.get("answer", "")).rpartition("####")[2].strip()
    if not gold:
        raise UsageError(f"{source} needs an `answer`")
    prompt = asked[0] if "\\boxed" in asked[0] else asked[0] + _ASK
    name = record.get("id", record.get("unique_id", index))
    level = record.get("level")
    if type(level) not in (int, str, type(None)):
        raise UsageError(f"{source}: `level` must be a whole number or a text, got {level!r}")
    return Problem(str(name), prompt, gold, level)


def judge_box(problem: Problem, result: Result) -> dict[str, Any]:
    """Right is what is in the answer's last box. Who is cut off while thinking has not answered."""
    given = boxed(result.text)
    return {"answer": given, "right": given is not None and equivalent(problem.gold, given)}


def judge_contains(problem: Problem, result: Result) -> dict[str, Any]:
    """Right is an answer whose first number, digit for digit, is the one that was asked for."""
    found = re.search(r"\d+", result.text)
    given = found and found[0]
    return {"answer": given, "right": given == problem.gold}


def reasoner_group(level: int, count: int, first: int, limit: float) -> Group:
    """Problems of the reasoner: see docs/reasoner.md.

    Args:
        level: tokens of a trace, a key of ``kvjax.train.reasoner.task.WIDTHS``.
        count: how many.
        first: number of the first one.
        limit: an answer that takes more than so many times the tokens of the reference is late, and
            wrong: else a cache that forgets could have everything derived once more.
    """
    problems, lengths = [], []
    for index in range(first, first + count):
        found = reasoner.problem(level, index)
        trace = found.tokens[found.prompt :]
        lengths.append(len(trace))
        prompt = list(found.tokens[: found.prompt])
        problems.append(Problem(str(index), prompt, str(found.answer), level, trace))

    def judge(problem: Problem, result: Result) -> dict[str, Any]:
        given = reasoner.answer_of(result.tokens)
        length = len(result.tokens) / len(problem.answer)
        good = given is not None and str(given) == problem.gold
        return {
            "answer": given,
            "right": good and length <= limit,
            "late": good and length > limit,
            "exact": tuple(result.tokens) == problem.answer,
            "length": length,
        }

    mean = round(statistics.fmean(lengths))
    return Group("reasoner", problems, judge, mean, round(limit * max(lengths)))


def named_groups(
    names: Sequence[str],
    *,
    data: str | None,
    levels: Sequence[int],
    count: int | None,
    first: int,
    limit: float,
    max_new_tokens: int,
) -> list[Group]:
    """The groups of ``--tasks``.

    Args:
        names: ``reasoner``, keys of ``FILES``, and files of JSON lines.
        data: the folder of data.
        levels: of the reasoner.
        count: problems of each task and level; None: all of a file, 256 of the reasoner.
        first: number of the first of them.
        limit: as for ``reasoner_group``.
        max_new_tokens: tokens that an answer to a file's problem may take.

    Raises:
        UsageError: a name that is none of these, or a file that cannot be used.
    """
    groups = []
    for name in names:
        if name == "reasoner":
            groups += [reasoner_group(level, count or 256, first, limit) for level in levels]
        elif name in FILES:
            if data is None:
                raise UsageError(
                    f"--tasks {name}: name the folder that holds {name}/test.jsonl "
                    f"with --data ({FILES[name]})"
                )
            path = pathlib.Path(data) / name / "test.jsonl"
            if not path.exists():
                raise UsageError(f"--tasks {name}: there is no {path}; it holds {FILES[name]}")
            groups.append(file_group(name, path, count, first, max_new_tokens))
        elif name.endswith(".jsonl"):
            path = pathlib.Path(name)
            groups.append(file_group(path.stem, path, count, first, max_new_tokens))
        else:
            raise UsageError(
                f"--tasks takes reasoner, {', '.join(FILES)} and files that end in .jsonl, "
                f"got {name!r}"
            )
    tasks = [(group.task, group.problems[0].level) for group in groups]
    if len(set(tasks)) < len(tasks):
        raise UsageError("--tasks: a task stands twice (a file is named without its folder)")
    return groups
