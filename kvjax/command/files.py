"""Reading what the user names, with one line that says what is wrong with it."""

import pathlib
import sys

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
