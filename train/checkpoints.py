"""Checkpoints of a training, by Orbax: whole or not there at all; the last and the best stay."""

import pathlib
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from kvjax.errors import UsageError

_SCORE = "score"


class Checkpoints:
    """A folder of checkpoints.

    A state is saved as its leaves in their order, so that what Optax and Flax nest them in is free
    to change.
    """

    def __init__(self, folder: pathlib.Path):
        """Open a folder, which is made if it is not there; what a killed run left half is removed.

        Raises:
            UsageError: it cannot be made or read.
        """
        policies = ocp.training.preservation_policies
        best = policies.BestN(get_metric_fn=lambda found: -found[_SCORE], n=1)
        try:
            self._checkpointer = ocp.training.Checkpointer(
                folder.absolute(),
                preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(1), best]),
                cleanup_tmp_directories=True,
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"cannot use {folder}: {reason}") from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error) -> None:
        self._checkpointer.close()

    @property
    def last(self) -> int | None:
        """The step of the newest checkpoint, None if there is none."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    @property
    def best(self) -> int | None:
        """The step of the checkpoint with the lowest score, the newest of equal ones."""
        found = self._checkpointer.checkpoints
        return min(found, key=lambda one: (one.metrics[_SCORE], -one.step)).step if found else None

    def save(self, step: int, state: Any, score: float) -> None:
        """Write a state, and remove those that are neither best nor last any more.

        Raises:
            UsageError: it cannot be written.
        """
        if step == self.last:
            return
        try:
            self._checkpointer.save(step, _by_number(state), force=True, metrics={_SCORE: score})
        except OSError as error:
            raise UsageError(f"cannot write a checkpoint: {error.strerror or error}") from error

    def load(self, step: int, like: Any) -> Any:
        """The state of a step, on the devices of ``like``.

        Raises:
            UsageError: it cannot be read, or is one of another model.
        """
        try:
            stored = self._checkpointer.load(step, _by_number(jax.tree.map(_shape, like)))
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise UsageError(f"the checkpoint of step {step} cannot be read: {reason}") from error
        leaves = [stored[name] for name in sorted(stored)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _by_number(tree: Any) -> dict[str, Any]:
    return {f"leaf_{index:05}": leaf for index, leaf in enumerate(jax.tree.leaves(tree))}


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return np.empty_like(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
