"""Where answers go: standard output, a file that grows, or a file that appears when complete."""

import os
import pathlib
import stat
import sys
from collections.abc import Callable
from typing import Protocol

from kvjax.command.files import is_within
from kvjax.errors import UsageError


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
        growing: rows are kept as they come. Otherwise the content is written aside and moved over
            the file at the end, so that a failed run leaves the old file alone.
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
        return _GrowingFile(path, target) if growing else _ReplacedFile(path, target)
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
    """Writes past Python's buffers, which would try again at exit what has failed once."""

    def __init__(self, name: str, handle):
        self.name = name
        self.handle = handle

    def write(self, text: str) -> None:
        _checked(self.name, lambda: self._write(text.encode()))

    def _write(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            left = left[self.handle.write(left) :]

    def close(self, *, complete: bool) -> None:
        del complete
        _checked(self.name, self.handle.close)


class _GrowingFile(_File):
    """Holds whole writes only. The old content goes when the first answer comes."""

    def __init__(self, name: str, target: pathlib.Path):
        self.fresh = not target.exists()
        self.target = target
        super().__init__(name, open(target, "ab", buffering=0))  # noqa: SIM115
        self.size = 0

    def _write(self, content: bytes) -> None:
        if self.size == 0:
            self.handle.truncate(0)
        try:
            super()._write(content)
        except OSError:
            self.handle.truncate(self.size)
            raise
        self.size += len(content)

    def close(self, *, complete: bool) -> None:
        super().close(complete=complete)
        if self.size == 0 and self.fresh:
            self.target.unlink()


class _ReplacedFile(_File):
    """A neighbour of the file until it is closed complete."""

    def __init__(self, name: str, target: pathlib.Path):
        if target.is_dir():
            raise IsADirectoryError(0, "it is a directory")
        self.target = target
        self.aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        if target.exists():
            open(target, "ab").close()
        super().__init__(name, open(self.aside, "xb", buffering=0))  # noqa: SIM115
        if target.exists():
            self.aside.chmod(stat.S_IMODE(target.stat().st_mode))

    def close(self, *, complete: bool) -> None:
        super().close(complete=complete)
        if complete:
            _checked(self.name, lambda: self.aside.replace(self.target))
        else:
            self.aside.unlink(missing_ok=True)


def _checked(name: str, action: Callable[[], object]) -> None:
    try:
        action()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {name}: {error.strerror}") from error


def open_closed_streams() -> None:
    """Give a process that was started with standard input or error closed empty ones."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def silence_standard_streams() -> None:
    """Drop what cannot be written, else Python would try again at exit and complain."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            os.dup2(devnull, stream.fileno())
    os.close(devnull)
