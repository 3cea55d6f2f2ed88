"""The key-value cache: an immutable pytree of pages, block tables and lengths."""

from kvjax.cache.cache import (
    FreeList,
    KVCache,
    LayerCache,
    held,
    held_blocks,
    held_latents,
    init_cache,
)
from kvjax.cache.geometry import ClassGeometry, Geometry, LayerGeometry
from kvjax.cache.plan import Plan, plan
from kvjax.cache.reset import reset_rows
from kvjax.cache.rows import put_rows, take_rows
from kvjax.cache.slots import (
    append,
    compact,
    evict,
    reserve,
    reserve_layer,
    revalue,
    store,
)

__all__ = [
    "ClassGeometry",
    "FreeList",
    "Geometry",
    "KVCache",
    "LayerCache",
    "LayerGeometry",
    "Plan",
    "append",
    "compact",
    "evict",
    "held",
    "held_blocks",
    "held_latents",
    "init_cache",
    "plan",
    "put_rows",
    "reserve",
    "reserve_layer",
    "reset_rows",
    "revalue",
    "store",
    "take_rows",
]
