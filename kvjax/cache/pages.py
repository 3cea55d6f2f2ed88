"""Who owns which page: taken from the free list, given back when no slot of it is live."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.cache.cache import FreeList
from pallas_kernels import SCRATCH_PAGE


def take_pages(
    free: FreeList, table: Int[Array, "B Hkv P"], wanted: Int[Array, "B Hkv"]
) -> tuple[Int[Array, "B Hkv P"], FreeList]:
    """Give every row and KV head as many more pages as it wants, while there are any.

    They go in order of row and head, so that a row gets what it wants whatever comes after it.
    """
    owned = (table != SCRATCH_PAGE).sum(-1, dtype=jnp.int32)[..., None]
    index = jnp.arange(table.shape[2], dtype=jnp.int32)[None, None]
    missing = (index >= owned) & (index < owned + wanted[..., None])
    order = jnp.cumsum(missing.ravel(), dtype=jnp.int32).reshape(missing.shape)
    missing &= order <= free.count
    taken = free.pages.at[free.count - order].get(mode="fill", fill_value=SCRATCH_PAGE)
    count = free.count - missing.sum(dtype=jnp.int32)
    return jnp.where(missing, taken, table), FreeList(free.pages, count)


def give_pages(
    free: FreeList, table: Int[Array, "B Hkv P"], empty: Bool[Array, "B Hkv P"]
) -> tuple[Int[Array, "B Hkv P"], FreeList]:
    """Put the empty pages back; those that stay move up in the table, in their order."""
    empty &= table != SCRATCH_PAGE
    order = jnp.cumsum(empty.ravel(), dtype=jnp.int32).reshape(empty.shape)
    nowhere = free.pages.shape[0]
    where = jnp.where(empty, free.count + order - 1, nowhere)
    pages = free.pages.at[where].set(table, mode="drop")
    free = FreeList(pages, free.count + empty.sum(dtype=jnp.int32))
    table = jnp.where(empty, SCRATCH_PAGE, table)
    front = jnp.argsort(table == SCRATCH_PAGE, axis=-1, stable=True)
    return jnp.take_along_axis(table, front, -1), free
