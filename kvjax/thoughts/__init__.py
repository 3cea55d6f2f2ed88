"""Thoughts of a reasoning model: what kind a stretch of its trace is, and what stays of it."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax.thoughts.retention import Retention
    from kvjax.thoughts.segmenters import Given, Segmenter, Sparsity
    from kvjax.thoughts.state import KINDS, Thoughts

# Imported when first asked for: the options of kvjax.calibrate live here too, and its --help must
# not wait for JAX.
_HOMES = {
    "KINDS": "state",
    "Given": "segmenters",
    "Retention": "retention",
    "Segmenter": "segmenters",
    "Sparsity": "segmenters",
    "Thoughts": "state",
}

__all__ = ["KINDS", "Given", "Retention", "Segmenter", "Sparsity", "Thoughts"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"kvjax.thoughts.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'kvjax.thoughts' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
