"""The real model that tests use where it has been fetched."""

import pathlib

import pytest

from kvjax.fetch_model import default_model_path


def path() -> pathlib.Path:
    """SmolLM2's GGUF file; skips the test where it is not there."""
    found = default_model_path()
    if found is None:
        pytest.skip("needs SmolLM2: `make demo` or `python -m kvjax.fetch_model smollm2` gets it")
    return found
