"""What a folder's run is, so that none goes on from, or is written over, another one."""

import json
import pathlib
import tempfile
from typing import Any

from kvjax.errors import UsageError
from kvjax.files import write_atomically

RUN = "run.json"


def check_claim(folder: pathlib.Path, identity: dict[str, Any], resume: bool) -> dict[str, Any]:
    """See that the folder is this run's, or nobody's, and can be written.

    Args:
        folder: made if it is not there.
        identity: all that decides what comes out of the run, or as much of it as is known.
        resume: whether the run may be there already.

    Returns:
        The identity of the run that is there; empty if there is none.

    Raises:
        UsageError: it is another run's, or cannot be written.
    """
    path = folder / RUN
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        if not path.exists():
            return {}
        before = json.loads(path.read_bytes())
        if not resume:
            raise UsageError(f"{folder} holds a run already: resume it, or name another folder")
        if different := _difference(before, json.loads(json.dumps(identity))):
            raise UsageError(f"{folder} holds a run with {different}: it cannot be resumed")
        return before
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot use {folder}: {reason}") from error


def claim(folder: pathlib.Path, identity: dict[str, Any], resume: bool) -> None:
    """Make the folder this run's, after ``check_claim``.

    Raises:
        UsageError: it is another run's, or cannot be written.
    """
    if check_claim(folder, identity, resume):
        return
    try:
        write_atomically(folder / RUN, f"{json.dumps(identity, indent=1)}\n".encode())
    except OSError as error:
        raise UsageError(f"cannot use {folder}: {error.strerror}") from error


def _difference(before: Any, now: dict[str, Any]) -> str | None:
    """The first setting that differs, and what it was."""
    before = before if isinstance(before, dict) else {}
    for name, value in now.items():
        old = before.get(name)
        if isinstance(value, dict):
            if found := _difference(old, value):
                return found
        elif old != value:
            return f"{name} {old!r} and not {value!r}"
    return None
