"""Decode reasoning language models in JAX with a KV cache that is compressed and still right.

>>> import kvjax
>>> lm = kvjax.load("path/to/model")  # doctest: +SKIP
>>> [answer] = kvjax.generate(lm, ["Tell me a story."], max_new_tokens=64)  # doctest: +SKIP
"""

from kvjax import recipes
from kvjax.decoding import Event, Result, generate, stream
from kvjax.errors import CapacityError, KvjaxError, ModelError, NumericalError, UsageError
from kvjax.loading import LanguageModel, load
from kvjax.models.forward import forward

__all__ = [
    "CapacityError",
    "Event",
    "KvjaxError",
    "LanguageModel",
    "ModelError",
    "NumericalError",
    "Result",
    "UsageError",
    "forward",
    "generate",
    "load",
    "recipes",
    "stream",
]
