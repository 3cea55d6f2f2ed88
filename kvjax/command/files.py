"""Reading what the user names, with one line that says what is wrong with it."""

import importlib.util
import os
import pathlib
import sys
import tempfile
from collections.abc import Mapping

from kvjax.errors import UsageError


def read_bytes(path: str, flag: str) -> bytes:
    """The content of a file, or of standard input for ``-``.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return sys.stdin.buffer.read() if path == "-" else pathlib.Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{flag}: cannot read {path}: {reason}") from error


def as_text(content: bytes, name: str) -> str:
    """UTF-8 text, without the byte order mark that some editors put first.

    Raises:
        UsageError: it is not UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise UsageError(f"{name} is not UTF-8: byte {error.start} is {byte:#04x}") from error


def read_text(path: str, flag: str) -> str:
    """The text of a UTF-8 file, or of standard input for ``-``.

    Raises:
        UsageError: it cannot be read or is not UTF-8.
    """
    name = "standard input" if path == "-" else path
    return as_text(read_bytes(path, flag), f"{flag}: {name}")


def check_matplotlib(flag: str) -> None:
    """Refuse a picture that could not be drawn.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"{flag} needs matplotlib: install it with `pip install matplotlib` (or kvjax with its "
            f"extra: `pip install 'kvjax[plot]'`), or drop {flag}"
        )


def check_writable(path: str, flag: str, inputs: tuple[str, ...] = ()) -> None:
    """Refuse a file that could not be written at the end of a run.

    Args:
        path: the file; it is left alone.
        flag: what named it, for messages.
        inputs: files and folders that are read, and so must not be written.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        target = pathlib.Path(os.path.realpath(path))
        if any(is_within(target, pathlib.Path(name).resolve()) for name in inputs):
            raise UsageError(f"{flag}: {path} is also an input; name another file")
        if target.exists() and not target.is_file():
            raise UsageError(f"{flag}: {path} is no regular file; name another one")
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            pass
        if target.exists():
            open(target, "ab").close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{flag}: cannot write {path}: {reason}") from error


def check_apart(outputs: Mapping[str, str | None]) -> None:
    """Refuse files to write that would take each other's place, also those that are not there yet.

    Args:
        outputs: what each flag names, None if nothing.

    Raises:
        UsageError: two name one file, or one cannot be a file's name.
    """
    named: dict[str, str] = {}
    for flag, path in outputs.items():
        if path is None:
            continue
        try:
            other = named.setdefault(os.path.realpath(path), flag)
        except (OSError, ValueError) as error:
            raise UsageError(f"{flag}: cannot write {path}: {error}") from error
        if other != flag:
            raise UsageError(f"{flag} and {other} both name {path}: name two files")


def is_within(target: pathlib.Path, source: pathlib.Path) -> bool:
    """Whether writing the target would change the source."""
    if target.exists() and source.exists() and os.path.samefile(target, source):
        return True
    # Only a file that is there can be lost: an answer beside a model's files is no harm.
    return source.is_dir() and target.is_file() and source in target.parents
