"""The devices that a run computes on, and the processes that share its work."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from kvjax.command.recipe import flags_in_errors
from kvjax.errors import UsageError
from kvjax.sharding import device_mesh

AUTO = "auto"
"""As a coordinator: JAX finds out from the environment who takes part, as Slurm tells it."""


def start_devices(config: Any) -> None:
    """Join the other processes of the run, if there are any, and see that there is a device.

    Args:
        config: options; those of a command without ``coordinator`` run in one process.

    Raises:
        UsageError: the others cannot be met, or JAX cannot start what it was told to use.
    """
    coordinator = getattr(config, "coordinator", None)
    if coordinator is not None:
        who = (None,) * 3
        if coordinator != AUTO:
            who = coordinator, config.num_processes, config.process_id
        try:
            jax.distributed.initialize(*who)
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise UsageError(f"--coordinator {coordinator}: {reason}") from error
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion where a plugin is missing
        asked = os.environ.get("JAX_PLATFORMS", "")
        reason = str(error).partition("\n")[0] or "it is not installed"
        raise UsageError(f"JAX cannot use JAX_PLATFORMS={asked!r}: {reason}") from error


def mesh_of(tp: int, dp: int) -> Mesh | None:
    """The devices of this process that a run takes; None for JAX's default one.

    Raises:
        UsageError: there are too few.
    """
    with flags_in_errors():
        return device_mesh(tp, dp) if tp * dp > 1 else None


def own_share(rows: Sequence) -> list:
    """The rows that this process works on: every one in its turn, where several share them."""
    return list(rows[jax.process_index() :: jax.process_count()])


def own_file(path: str | None) -> str | None:
    """Where this process writes what all are told to: ``answers.jsonl`` is ``answers.0.jsonl``."""
    if path is None or jax.process_count() == 1:
        return path
    file = pathlib.Path(path)
    return str(file.with_name(f"{file.stem}.{jax.process_index()}{file.suffix}"))
