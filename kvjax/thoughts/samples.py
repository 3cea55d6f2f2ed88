"""Samples of a run that may be interrupted: a folder with one file a finished prompt."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32

from kvjax.errors import UsageError
from kvjax.files import write_atomically

_RUN = "run.json"
_SAMPLE = re.compile(r"(\d+)\.npy")
_OURS = re.compile(rf"(\.)?({re.escape(_RUN)}|{_SAMPLE.pattern})(\.\d+\.tmp)?")


@dataclasses.dataclass(frozen=True)
class Samples:
    """Where they are, and whose.

    Attributes:
        folder: holds nothing else.
        run: all that decides the samples, ready for JSON. Samples of another run are never taken.
        layers: of the model.
    """

    folder: pathlib.Path
    run: Mapping[str, Any]
    layers: int

    def read(self) -> dict[int, Float32[np.ndarray, "L N"]]:
        """What is there already, by the prompt's index.

        Raises:
            UsageError: the folder belongs to another run, or is damaged.
        """
        if not self.folder.exists():
            return {}
        try:
            held = {
                int(match[1]): path
                for path in self.folder.iterdir()
                if (match := _SAMPLE.fullmatch(path.name))
            }
            if not held:
                return {}
            self._check_run(json.loads((self.folder / _RUN).read_bytes()))
            return {index: self._sample(path) for index, path in sorted(held.items())}
        except (OSError, ValueError, RecursionError, EOFError) as error:
            raise self._refused(f"cannot be read ({error})") from error

    def _check_run(self, other: Any) -> None:
        if not isinstance(other, dict):
            raise self._refused("cannot be read")
        differ = [key for key in self.run if other.get(key) != self.run[key]]
        if differ:
            key = differ[0]
            raise self._refused(
                f"belongs to another run: {key} was {other.get(key)!r} and is {self.run[key]!r}"
            )

    def _sample(self, path: pathlib.Path) -> np.ndarray:
        found = np.load(path, allow_pickle=False)
        shaped = found.ndim == 2 and found.shape[0] == self.layers and found.shape[1] > 0
        if found.dtype != np.float32 or not shaped or not ((found >= 0) & (found <= 1)).all():
            raise ValueError(f"{path.name} holds no samples of {self.layers} layers")
        return found

    def _refused(self, why: str) -> UsageError:
        return UsageError(
            f"{self.folder} {why}; delete it to start anew, or name another file for the result"
        )

    def add(self, index: int, sample: Float32[np.ndarray, "L N"]) -> None:
        """Keep the samples of a prompt; they are on disk when this returns.

        Raises:
            UsageError: they cannot be written.
        """
        content = io.BytesIO()
        np.save(content, sample, allow_pickle=False)
        try:
            self.folder.mkdir(exist_ok=True)
            write_atomically(self.folder / _RUN, json.dumps(self.run, indent=1).encode())
            write_atomically(self.folder / f"{index}.npy", content.getvalue())
        except OSError as error:
            raise UsageError(f"cannot write {self.folder}: {error.strerror}") from error

    def remove(self) -> None:
        """Delete what belongs here, and the folder unless something else is in it."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.folder):
                if _OURS.fullmatch(name):
                    (self.folder / name).unlink()
            self.folder.rmdir()
