"""What every source of weights offers, whatever its file format."""

from typing import Protocol

import numpy as np

from kvjax.errors import ModelError

_CHECK_ELEMENTS = 1 << 22  # elements looked at together, so that the check needs little memory


class Checkpoint(Protocol):
    """Named tensors, in the names and layouts that Hugging Face transformers gives them."""

    source: str
    """The file or directory, for messages."""
    names: frozenset[str]

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, from the header alone."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor in float32, float16 or bfloat16. The caller may keep or overwrite it."""
        ...

    def digest(self, name: str) -> bytes:
        """What is stored under the name, in short: its type and a small sample of its bytes."""
        ...


def check_finite(array: np.ndarray, name: str, source: str) -> None:
    """Refuse a tensor that holds NaN or infinity."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHECK_ELEMENTS):
        if not np.isfinite(flat[start : start + _CHECK_ELEMENTS]).all():
            raise ModelError(
                f"{source}: tensor {name} holds NaN or infinity, expected finite numbers; "
                "the file is damaged or was converted wrongly, fetch or convert it again"
            )


def sample_positions(size: int, width: int, count: int = 4) -> list[int]:
    """Where to take ``count`` samples of ``width`` bytes, spread evenly over ``size`` bytes."""
    last = max(size - width, 0)
    return sorted({last * i // max(count - 1, 1) for i in range(count)})
