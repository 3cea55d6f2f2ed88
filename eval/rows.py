"""Rows of a run in a file that grows: what has been finished is never computed again."""

import fcntl
import hashlib
import json
import os
import pathlib
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from kvjax.command.output import OutputError
from kvjax.errors import UsageError
from kvjax.eval.record import run_record, write_json


def row_key(*content: Any) -> str:
    """Names what a row follows from."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Known:
    """Rows that are there.

    A row has fields that name it (``place``) and a ``key``, of all that it follows from: settings,
    recipe and problem. A row of the same place and another key is another run's.

    Attributes:
        rows: all of them, those of earlier runs first.
    """

    def __init__(self, flag: str, place: tuple[str, ...]):
        self._flag, self._place = flag, place
        self._found: dict[tuple[Hashable, ...], tuple[str, pathlib.Path]] = {}
        self.rows: list[dict[str, Any]] = []

    def _at(self, row: Mapping[str, Any]) -> tuple[Hashable, ...]:
        return tuple(row[name] for name in self._place)

    def has(self, key: str, **place: Hashable) -> bool:
        """Whether the row is there.

        Raises:
            UsageError: another run's is.
        """
        found, path = self._found.get(self._at(place), (key, None))
        if found != key:
            raise self._another(place, f"{path} has")
        return path is not None

    def close(self) -> None:
        """Nothing more is added."""

    def _another(self, place: Mapping[str, Hashable], what: str) -> UsageError:
        """What is said of rows of one place that follow from different things."""
        words = ", ".join(f"{name} {place[name]}" for name in self._place)
        return UsageError(
            f"{self._flag}: {what} the row of {words} from another model, or from other data, "
            "settings or recipes of this name: name another folder"
        )

    def _keep(self, row: dict[str, Any], path: pathlib.Path) -> None:
        self.rows.append(row)
        self._found[self._at(row)] = row["key"], path

    def _take(self, path: pathlib.Path, content: bytes) -> None:
        """Have the rows of a file's whole lines, each once."""
        for number, line in enumerate(content.split(b"\n"), 1):
            if line:
                row = _read(self._flag, path, number, line, {"key", *self._place})
                found, first = self._found.get(self._at(row), (None, path))
                if found is None:
                    self._keep(row, path)
                elif found != row["key"]:
                    files = f"{path} has" if first == path else f"{first} and {path} each have"
                    raise self._another(row, files)


class GatheredRows(_Known):
    """The rows of all files of a name below a folder, to which others may still be writing."""

    def __init__(self, folder: pathlib.Path, name: str, place: tuple[str, ...]):
        """Read them.

        Raises:
            UsageError: there are none, one is damaged, or two have different rows of one place.
        """
        super().__init__("--gather", place)
        paths = sorted(folder.rglob(name))
        if not paths:
            raise UsageError(f"--gather: no folder in {folder} holds a {name}")
        for path in paths:
            try:
                content = path.read_bytes()
            except OSError as error:
                raise UsageError(f"--gather: cannot read {path}: {error.strerror}") from error
            self._take(path, content.rpartition(b"\n")[0])


class Rows(_Known):
    """The rows of one file of JSON lines; each is in it when ``add`` returns."""

    def __init__(self, path: pathlib.Path, place: tuple[str, ...]):
        """Open the file, or make it; a last line that was cut off is dropped.

        Raises:
            UsageError: it cannot be opened, is damaged, or another process writes to it.
        """
        super().__init__("--out", place)
        self._path = path
        try:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UsageError(f"--out: cannot write {path}: {error.strerror}") from error
        try:
            self._read_all()
        except BaseException:
            self.close()
            raise

    def _read_all(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"--out: another process writes to {self._path}") from error
        self._file.seek(0)
        content = self._file.read()
        whole = content.rpartition(b"\n")[0]
        self._file.truncate(len(whole) + bool(whole))
        self._take(self._path, whole)

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
        self._keep(row, self._path)

    def close(self) -> None:
        self._file.close()


def _read(
    flag: str, path: pathlib.Path, number: int, line: bytes, needed: set[str]
) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if needed <= row.keys():
            return row
    except (ValueError, AttributeError, RecursionError):
        pass
    raise UsageError(
        f"{flag}: line {number} of {path} is damaged: delete it, or name another folder"
    )


def _results(path: pathlib.Path) -> dict[str, Any] | None:
    """What a file of results holds, if it is one."""
    try:
        found = json.loads(path.read_text())
        return found if {"run", "commands"} <= found.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def write_results(
    path: pathlib.Path,
    record: dict[str, Any],
    commit: str | None,
    parts: Iterable[pathlib.Path] = (),
) -> None:
    """Write what was found, with the commands that have led to it: this one, and earlier ones that
    the file tells of.

    Args:
        path: of the file.
        record: what was found.
        commit: of the code, where this runs outside a checkout.
        parts: files of results whose rows were gathered; devices and commits are theirs.

    Raises:
        OutputError: it cannot be written; an old file stays.
    """
    run, parts = run_record(commit), list(filter(None, map(_results, parts)))
    before = [*parts, *filter(None, [_results(path)])]
    commands = [command for one in before for command in one["commands"]]
    commands = list(dict.fromkeys([*commands, run["command"]]))
    if parts:
        for name in ("commit", "device", "jax"):
            run[name] = ", ".join(sorted({one["run"][name] for one in parts}))
    try:
        write_json(path, {"run": run, "commands": commands, **record})
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
