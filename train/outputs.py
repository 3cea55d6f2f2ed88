"""Files that are written when the work is done, and so have to be looked at before it begins."""

import pathlib

from kvjax.command.files import check_writable
from kvjax.errors import UsageError


def prepare(path: pathlib.Path, inputs: tuple[str, ...] = ()) -> None:
    """Make the folder of what ``--out`` names, and see that the file can be written there.

    Args:
        path: the file; it is left alone.
        inputs: files and folders that are read, and so must not be written.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: cannot write {path}: {error.strerror}") from error
    check_writable(str(path), "--out", inputs)
