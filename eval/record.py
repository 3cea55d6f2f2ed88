"""What every benchmark writes beside its figures."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import jax

from kvjax.files import write_atomically


def run_record(commit: str | None = None) -> dict[str, Any]:
    """The command, commit, device and version that made a figure.

    Args:
        commit: given where the benchmark runs outside a checkout.
    """
    return {
        "command": " ".join(["python -m", _module(), *sys.argv[1:]]),
        "commit": commit or _commit(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def write_json(path: pathlib.Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else sys.argv[0]


def _commit() -> str:
    git = ["git", "-C", str(pathlib.Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}, changed" if changed else head
