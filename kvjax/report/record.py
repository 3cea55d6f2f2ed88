"""The JSON record of one prompt."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from kvjax.decoding.events import Result


def record(
    name: str | int, result: Result, load_s: float, *, fit: str | None = None
) -> dict[str, Any]:
    """What is kept of an answer: the result, its report, and what only the command knows.

    Args:
        name: the prompt's id.
        result: the answer.
        load_s: seconds that loading the model took.
        fit: the memory that the recipe was chosen for, if it was.
    """
    if result.error and not result.report:
        return failed(name, result.error)
    if not result.report:  # interrupted before it began
        return {"id": name, "text": "", "reasoning": None, "finish_reason": result.finish_reason}
    answer = {
        "id": name,
        "text": result.text,
        "reasoning": result.reasoning,
        "finish_reason": result.finish_reason,
        **result.report,
    }
    answer["timing"] = {"load_s": load_s, **result.report["timing"]}
    settings = json.dumps(result.report["run"], sort_keys=True)
    answer["run"] = {
        **result.report["run"],
        "config_sha": hashlib.sha256(settings.encode()).hexdigest()[:16],
    }
    if fit is not None:
        answer["run"]["fit"] = fit
    return answer | ({"error": result.error} if result.error else {})


def failed(name: str | int, error: str) -> dict[str, Any]:
    """The record of a prompt that was not decoded."""
    return {"id": name, "text": "", "reasoning": None, "finish_reason": "error", "error": error}


def failures(records: Sequence[dict[str, Any]]) -> tuple[list[tuple[str | int, str]], ...]:
    """Ids and errors of the answers that failed, and of the comparisons that did."""
    parts = [(record["id"], record, record.get("quality", {})) for record in records]
    return (
        [(name, answer["error"]) for name, answer, _ in parts if "error" in answer],
        [(name, quality["error"]) for name, _, quality in parts if "error" in quality],
    )
