"""Answers in the asked format and in the prompts' order, each as soon as its turn comes."""

import json
from typing import Any, Literal

from kvjax.command.output import Output


class Answers:
    """Writes records. Row ``i`` waits for the rows before it, but not longer than the run."""

    def __init__(self, output: Output, form: Literal["text", "json", "jsonl"], *, listed: bool):
        """``listed`` makes one JSON list of the answers instead of one object."""
        self._output = output
        self._form = form
        self._listed = listed
        self._waiting: dict[int, dict[str, Any]] = {}
        self._next = 0
        self._added: set[int] = set()
        self._streamed = ""
        self._finished = False
        self.records: list[dict[str, Any]] = []

    def stream(self, text: str) -> None:
        """Write a piece of the only row's text, instead of all of it at the end."""
        if text:
            self._output.write(text)
            self._streamed = text

    def __contains__(self, row: int) -> bool:
        return row in self._added

    def add(self, row: int, record: dict[str, Any]) -> None:
        self._waiting[row] = record
        self._added.add(row)
        while self._next in self._waiting:
            self._write(self._waiting.pop(self._next))
            self._next += 1

    def finish(self) -> None:
        """Write what still waits for a row that never came; nothing is written twice."""
        for row in sorted(self._waiting):
            self._write(self._waiting.pop(row))
        if self._form == "json" and self.records and not self._finished:
            self._finished = True
            content = self.records if self._listed else self.records[0]
            self._output.write(json.dumps(content, ensure_ascii=False, indent=2) + "\n")

    def _write(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if self._form == "jsonl":
            self._output.write(json.dumps(record, ensure_ascii=False) + "\n")
        elif self._form == "text":
            text = "" if self._streamed else record["text"]
            ended = (self._streamed or text).endswith("\n")
            self._output.write(text + ("" if ended else "\n"))
