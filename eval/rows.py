"""Rows of a run in a file that grows: what has been finished is never computed again."""

import fcntl
import hashlib
import json
import os
import pathlib
from collections.abc import Hashable, Mapping
from typing import Any

from kvjax.command.output import OutputError
from kvjax.errors import UsageError
from kvjax.eval.record import run_record, write_json


def row_key(*content: Any) -> str:
    """Names what a row follows from."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Rows:
    """The rows of one file of JSON lines; each is in it when ``add`` returns.

    A row has fields that name it (``place``) and a ``key``, of all that it follows from: settings,
    recipe and problem. A row of the same place and another key is another run's.

    Attributes:
        rows: all of them, those of earlier runs first.
    """

    def __init__(self, path: pathlib.Path, place: tuple[str, ...]):
        """Open the file, or make it; a last line that was cut off is dropped.

        Raises:
            UsageError: it cannot be opened, is damaged, or another process writes to it.
        """
        self._path, self._place = path, place
        try:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UsageError(f"--out: cannot write {path}: {error.strerror}") from error
        try:
            self.rows = self._read_all()
        except BaseException:
            self.close()
            raise
        self._keys = {self._at(row): row["key"] for row in self.rows}

    def _read_all(self) -> list[dict[str, Any]]:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"--out: another process writes to {self._path}") from error
        self._file.seek(0)
        content = self._file.read()
        whole = content.rpartition(b"\n")[0]
        self._file.truncate(len(whole) + bool(whole))
        return [self._read(n, line) for n, line in enumerate(whole.split(b"\n"), 1) if line]

    def _read(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line)
            if {"key", *self._place} <= row.keys():
                return row
        except (ValueError, AttributeError, RecursionError):
            pass
        raise UsageError(
            f"--out: line {number} of {self._path} is damaged: delete it, or name another folder"
        )

    def _at(self, row: Mapping[str, Any]) -> tuple[Hashable, ...]:
        return tuple(row[name] for name in self._place)

    def has(self, key: str, **place: Hashable) -> bool:
        """Whether the row is there.

        Raises:
            UsageError: another run's is.
        """
        found = self._keys.get(self._at(place))
        if found is not None and found != key:
            words = ", ".join(f"{name} {value}" for name, value in place.items())
            raise UsageError(
                f"--out: {self._path} has the row of {words} from another model, or from other "
                "data, settings or recipes of this name: name another folder"
            )
        return found is not None

    def add(self, row: dict[str, Any]) -> None:
        """Write a row.

        Raises:
            OutputError: it cannot be written; the rows before it stay.
        """
        content = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        start = os.fstat(self._file.fileno()).st_size
        try:
            left = memoryview(content)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._file.truncate(start)
            raise OutputError(f"cannot write {self._path}: {error.strerror}") from error
        self.rows.append(row)
        self._keys[self._at(row)] = row["key"]

    def close(self) -> None:
        self._file.close()


def write_results(path: pathlib.Path, record: dict[str, Any], commit: str | None) -> None:
    """Write what was found, with the commands that have led to it: this one, and earlier ones that
    the file tells of.

    Raises:
        OutputError: it cannot be written; an old file stays.
    """
    run = run_record(commit)
    try:
        before = json.loads(path.read_text())["commands"]
    except (OSError, ValueError, KeyError, TypeError):
        before = []
    commands = list(dict.fromkeys([*before, run["command"]]))
    try:
        write_json(path, {"run": run, "commands": commands, **record})
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
