"""Files of JSON lines that ``--tasks`` names."""

import pathlib
from collections.abc import Sequence

from kvjax.command.files import as_text, read_bytes
from kvjax.errors import UsageError


def numbered_lines(path: pathlib.Path) -> list[tuple[int, str]]:
    """The lines that hold anything, each with its number in the file.

    Raises:
        UsageError: the file cannot be read.
    """
    text = as_text(read_bytes(str(path), "--tasks"), str(path))
    return [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]


def check_once(path: pathlib.Path, names: Sequence[str], what: str) -> None:
    """Refuse a name that stands twice.

    Raises:
        UsageError: saying which, and of ``what``.
    """
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--tasks: {path} has two {what} {twice!r}")
