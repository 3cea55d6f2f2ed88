"""The golden models, loaded as a user would load them."""

import functools
import pathlib

import numpy as np

import kvjax

FOLDER = pathlib.Path(__file__).parents[1] / "golden"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/golden.npz"))
CONTEXT = 128  # of every golden model


@functools.cache
def load(name: str) -> kvjax.LanguageModel:
    """The model of one golden folder in float32."""
    return kvjax.load(FOLDER / name)


@functools.cache
def values(name: str) -> dict[str, np.ndarray]:
    """What PyTorch computed for it."""
    with np.load(FOLDER / name / "golden.npz") as file:
        return dict(file)


def relative_error(actual, expected) -> float:
    """Largest difference over the largest expected value."""
    return float(np.abs(np.asarray(actual) - expected).max() / np.abs(expected).max())
