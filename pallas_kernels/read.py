"""What pages say: the one place where codes become numbers again, whoever reads them."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.einsum import einsum_float32
from pallas_kernels.formats import levels
from pallas_kernels.layout import KVPages
from pallas_kernels.rotation import rotate, unrotate


def coded_keys(
    pages: KVPages, table: Int[Array, "*N"], dtype: DTypeLike
) -> Float[Array, "*N page D"]:
    """Keys of the named pages, in the class's own basis."""
    parts = (pages.k, pages.k_scale, pages.k_zero)
    return _numbers(parts, pages.k_format, -1, table, dtype)


def coded_values(
    pages: KVPages, table: Int[Array, "*N"], dtype: DTypeLike
) -> Float[Array, "*N D page"]:
    """Values of the named pages, in the class's own basis."""
    parts = (pages.v, pages.v_scale, pages.v_zero)
    return _numbers(parts, pages.v_format, -2, table, dtype)


def coded_queries(
    pages: KVPages, q: Float[Array, "B Hq D"]
) -> tuple[Float[Array, "B Hq D"], Float[Array, "B Hq"] | None]:
    """Queries in the basis of the class's keys, and ``q . mean``, which those keys lack."""
    if pages.mean is None and pages.balance is None and not pages.rotated:
        return q, None
    kv_heads = pages.mean if pages.mean is not None else pages.balance
    turned, offset = q, None
    if kv_heads is not None:
        grouped = q.astype(jnp.float32).reshape(len(q), len(kv_heads), -1, q.shape[-1])
    if pages.mean is not None:
        offset = (grouped * pages.mean[None, :, None]).sum(-1).reshape(q.shape[:2])
    if pages.balance is not None:
        turned = (grouped * pages.balance[None, :, None]).reshape(q.shape)
    return (rotate(turned) if pages.rotated else turned).astype(q.dtype), offset


def slot_products(
    pages: KVPages, table: Int[Array, "B Hkv P"], q: Float[Array, "B Hq D"]
) -> Float32[Array, "B Hkv G S"]:
    """``q . k`` of every query head with every slot of the named pages; no key leaves its basis."""
    rows, heads, _ = table.shape
    q, offset = coded_queries(pages, q)
    k = coded_keys(pages, table, q.dtype).reshape(rows, heads, -1, q.shape[2])
    dots = einsum_float32("bhgd,bhsd->bhgs", q.reshape(rows, heads, -1, q.shape[2]), k)
    return dots if offset is None else dots + offset.reshape(rows, heads, -1, 1)


def plain_output(pages: KVPages, out: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
    """A weighted sum of the class's values, as the model's own values would have given it."""
    return unrotate(out) if pages.rotated else out


def plain_keys(
    pages: KVPages, table: Int[Array, "B Hkv P"], dtype: DTypeLike
) -> Float[Array, "B Hkv P page D"]:
    """Keys as the model made them, but for what coding took."""
    return _plain(pages, coded_keys(pages, table, jnp.float32)).astype(dtype)


def plain_values(
    pages: KVPages, table: Int[Array, "B Hkv P"], dtype: DTypeLike
) -> Float[Array, "B Hkv P page D"]:
    """Values as the model made them, but for what coding took; one row a slot."""
    v = coded_values(pages, table, jnp.float32).swapaxes(-1, -2)
    return plain_output(pages, v).astype(dtype)


def plain_slot_keys(
    pages: KVPages, at: Int[Array, "B Hkv T"], slots: Int[Array, "B Hkv T"], dtype: DTypeLike
) -> Float[Array, "B Hkv T D"]:
    """Keys of single slots, as the model made them, but for what coding took.

    Args:
        at: the page of each slot.
    """
    rows, heads, count = at.shape

    def taken(array):
        if array is None:
            return None
        shared = pages.page_size // array.shape[1]  # slots that share an entry
        return array[at, slots // shared].reshape(rows * heads, count, -1)

    parts = (taken(pages.k), taken(pages.k_scale), taken(pages.k_zero))
    table = jnp.arange(rows * heads, dtype=jnp.int32).reshape(rows, heads, 1)
    k = _numbers(parts, pages.k_format, -1, table, jnp.float32)
    return _plain(pages, k)[:, :, 0].astype(dtype)


def _plain(pages: KVPages, k: Float[Array, "B Hkv P page D"]) -> Float[Array, "B Hkv P page D"]:
    """Keys out of the class's own basis."""
    k = unrotate(k) if pages.rotated else k
    if pages.balance is not None:
        k = k * pages.balance[None, :, None, None]
    if pages.mean is not None:
        k = k + pages.mean[None, :, None, None]
    return k


def _numbers(parts, fmt: str, axis: int, table, dtype) -> Array:
    codes, scale, zero = (None if part is None else part[table] for part in parts)
    if fmt == "float":
        return codes.astype(dtype)
    wide = levels(codes, fmt, axis)
    shared = _shared(wide, scale)
    for part, combine in ((scale, jnp.multiply), (zero, jnp.add)):
        if part is not None:
            part = part.astype(jnp.float32)[..., :, None, :, None]
            wide = combine(wide.reshape(shared), part).reshape(wide.shape)
    return wide.astype(dtype)


def _shared(wide, scale) -> tuple[int, ...]:
    """The last two axes, each split by what shares a scale."""
    rows, columns = scale.shape[-2:]
    return (*wide.shape[:-2], rows, wide.shape[-2] // rows, columns, wide.shape[-1] // columns)
