"""The key-value cache: an immutable pytree of pages, block tables and lengths."""

from kvjax.cache.cache import FreeList, KVCache, LayerCache, init_cache, usage
from kvjax.cache.plan import Geometry, Plan, plan
from kvjax.cache.slots import append, reserve

__all__ = [
    "FreeList",
    "Geometry",
    "KVCache",
    "LayerCache",
    "Plan",
    "append",
    "init_cache",
    "plan",
    "reserve",
    "usage",
]
