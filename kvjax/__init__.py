"""Decode reasoning language models in JAX with a KV cache that is compressed and still right.

>>> import kvjax
>>> lm = kvjax.load("path/to/model")  # doctest: +SKIP
>>> [answer] = kvjax.generate(lm, ["Tell me a story."], max_new_tokens=64)  # doctest: +SKIP
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax import recipes
    from kvjax.decoding import Event, Result, generate, stream
    from kvjax.decoding.conversation import Conversation
    from kvjax.decoding.rewind import rewind
    from kvjax.decoding.saved import load_cache, save_cache
    from kvjax.errors import CapacityError, KvjaxError, ModelError, NumericalError, UsageError
    from kvjax.loading import LanguageModel, load
    from kvjax.models.forward import forward
    from kvjax.sharding import device_mesh

__version__ = "0.1.0"

# Where each public name lives. Imported when first asked for: JAX takes a second to import, and a
# command has to answer --help and Ctrl-C before that.
_HOMES = {
    "CapacityError": "kvjax.errors",
    "Conversation": "kvjax.decoding.conversation",
    "Event": "kvjax.decoding",
    "KvjaxError": "kvjax.errors",
    "LanguageModel": "kvjax.loading",
    "ModelError": "kvjax.errors",
    "NumericalError": "kvjax.errors",
    "Result": "kvjax.decoding",
    "UsageError": "kvjax.errors",
    "device_mesh": "kvjax.sharding",
    "forward": "kvjax.models.forward",
    "generate": "kvjax.decoding",
    "load": "kvjax.loading",
    "load_cache": "kvjax.decoding.saved",
    "rewind": "kvjax.decoding.rewind",
    "save_cache": "kvjax.decoding.saved",
    "stream": "kvjax.decoding",
}

__all__ = [
    "CapacityError",
    "Conversation",
    "Event",
    "KvjaxError",
    "LanguageModel",
    "ModelError",
    "NumericalError",
    "Result",
    "UsageError",
    "device_mesh",
    "forward",
    "generate",
    "load",
    "load_cache",
    "recipes",
    "rewind",
    "save_cache",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name == "recipes":
        return importlib.import_module("kvjax.recipes")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
