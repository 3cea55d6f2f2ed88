"""Golden models on a mesh of CPU devices."""

import functools

import kvjax
from kvjax.sharding import device_mesh
from tests.decoding import small
from tests.models import goldens


@functools.cache
def lm(tp: int = 2, dp: int = 1, name: str = "llama") -> kvjax.LanguageModel:
    """A golden model on several devices, with room for long rows."""
    model = kvjax.load(goldens.FOLDER / name, mesh=device_mesh(tp, dp))
    return small.with_context(model)
