"""Where answers go: standard output, a file that grows, or a file that appears when complete."""

import io
import os
import pathlib
import secrets
import stat
import sys
from collections.abc import Callable
from typing import Protocol

from kvjax.command.files import is_within
from kvjax.errors import UsageError
from kvjax.report.say import drop


class OutputError(UsageError):
    """Answers cannot be written: a full disk, most often."""


class Output(Protocol):
    """A place for answers. Whatever is written is in it when ``write`` returns."""

    def write(self, text: str) -> None: ...

    def close(self, *, complete: bool) -> None:
        """Finish; ``complete`` is False when the run failed."""


def open_output(path: str | None, *, growing: bool, inputs: tuple[str, ...] = ()) -> Output:
    """Open what ``--output`` names before anything is computed for it.

    Args:
        path: a file, or None for standard output.
        growing: the first answer takes the old file's place when it is whole, and the others
            follow it as they come. Otherwise all of them together do, at the end of the run.
        inputs: files and folders that are read, and so must not be written.

    Raises:
        UsageError: it cannot be written.
    """
    if path is None and sys.stdout is None:
        raise UsageError("standard output is closed: name a file with --output")
    if path is None:
        return _StandardOutput()
    try:
        target = pathlib.Path(os.path.realpath(path))
        if any(is_within(target, pathlib.Path(name).resolve()) for name in inputs):
            raise UsageError(f"--output: {path} is also an input; name another file")
        special = target.exists() and not target.is_file() and not target.is_dir()
        if special:
            return _File(path, open(target, "wb", buffering=0))
        return _NewFile(path, target, growing=growing)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--output: cannot write {path}: {reason}") from error


class _StandardOutput:
    def write(self, text: str) -> None:
        _checked("standard output", lambda: print(text, end="", flush=True))

    def close(self, *, complete: bool) -> None:
        del complete
        _checked("standard output", sys.stdout.flush)


class _File:
    """Writes past Python's buffers, which would try again at exit what has failed once.

    What cannot be written goes to standard output instead, as does all that comes after it: an
    answer may have taken hours.
    """

    def __init__(self, name: str, handle):
        self.name = name
        self.handle = handle
        self.failed = False

    def write(self, text: str) -> None:
        content = text.encode()
        if self.failed:
            _rescue(content)
            return
        try:
            _checked(self.name, lambda: self._write(content))
        except OutputError as error:
            self.failed = True
            rescued = _rescue(self._unplaced() + content)
            raise OutputError(f"{error}{rescued}") from error

    def _write(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            left = left[self.handle.write(left) :]

    def _unplaced(self) -> bytes:
        """What was written before and will not stay."""
        return b""

    def close(self, *, complete: bool) -> None:
        del complete
        _checked(self.name, self.handle.close)


class _NewFile(_File):
    """A neighbour of the file until what it holds may take the old file's place.

    Of a growing file that is the first answer, and later answers follow it; of any other all that
    there is, once it is closed complete. It holds whole writes only.
    """

    def __init__(self, name: str, target: pathlib.Path, *, growing: bool):
        if target.is_dir():
            raise IsADirectoryError(0, "it is a directory")
        self.target, self.growing = target, growing
        # Not the process's number: in containers it is often the same, and a killed run leaves it.
        self.aside = target.with_name(f".kvjax-{secrets.token_hex(8)}.tmp")
        if target.exists():
            open(target, "ab").close()
        super().__init__(name, open(self.aside, "xb", buffering=0))  # noqa: SIM115
        if target.exists():
            self.aside.chmod(stat.S_IMODE(target.stat().st_mode))
        self.size = 0
        self.placed = False

    def _write(self, content: bytes) -> None:
        try:
            super()._write(content)
        except OSError:
            self.handle.seek(self.size)
            self.handle.truncate()
            raise
        if self.growing and not self.placed:
            self._place()
        self.size += len(content)

    def _place(self) -> None:
        self.aside.replace(self.target)
        self.placed = True

    def _unplaced(self) -> bytes:
        return b"" if self.placed else self.aside.read_bytes()[: self.size]

    def close(self, *, complete: bool) -> None:
        super().close(complete=complete)
        if self.placed:
            return
        if not complete or self.failed or self.growing:
            self.aside.unlink(missing_ok=True)
            return
        try:
            _checked(self.name, self._place)
        except OutputError as error:
            raise OutputError(f"{error}; the answer is in {self.aside}") from error


def _rescue(content: bytes) -> str:
    """Write to standard output what has no place any more; returns what to say about it."""
    if sys.stdout is None:
        return ""
    try:
        print(content.decode(), end="", flush=True)
    except (OSError, ValueError):
        return ""
    return "; the answer is on standard output"


def _checked(name: str, action: Callable[[], object]) -> None:
    try:
        action()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {name}: {error.strerror}") from error


def prepare_streams() -> None:
    """Give a process that was started with standard input or error closed empty ones.

    Answers are UTF-8 wherever they go, whatever the locale.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")


def print_out(text: str) -> None:
    """Print what a command is asked for beside answers.

    Raises:
        UsageError: standard output cannot be written.
    """
    output = open_output(None, growing=True)
    output.write(text)


def silence_standard_streams() -> None:
    """Drop what cannot be written, else Python would try again at exit and complain."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            drop(stream)
