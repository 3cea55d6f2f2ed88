"""The public op: what goes in is checked here, then a backend computes it."""

import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import KVPages
from pallas_kernels.paged_attention.triton import paged_attention_triton, unsupported
from pallas_kernels.paged_attention.xla import paged_attention_xla

Implementation = Literal["triton", "xla"]


def paged_attention(
    q: Float[Array, "B Hq D"],
    pools: Sequence[KVPages],
    tables: Sequence[Int[Array, "B Hkv _"]],
    *,
    scale: float,
    q_pos: Int[Array, " B"] | None = None,
    window: int | None = None,
    sinks: Float[Array, " Hq"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B Hq D"], Float[Array, "B Hq"]]:
    """Softmax attention of one query a row over the live slots of its pages, in one softmax.

    Query head ``h`` reads KV head ``h // (Hq // Hkv)``. A slot's logit is ``q . k * scale + bias``.

    Args:
        q: queries with their rotary position applied.
        pools: one pool for each codec class.
        tables: for each pool, the pages of every row and KV head, padded with ``SCRATCH_PAGE``.
        scale: multiplies ``q . k``.
        q_pos: logical position of each row's query; needed with ``window`` alone.
        window: if given, only slots with ``q_pos - pos < window`` are seen.
        sinks: a learned logit for each query head that takes mass and has no value (GPT-OSS).
        implementation: a backend by name, which fails loudly where it cannot run; ``None`` takes
            the kernel on NVIDIA GPUs where it can run, and XLA otherwise.

    Returns:
        The float32 output, zero for a row without live slots, and the float32 log-sum-exp of its
        logits, sink included (``-inf`` where there is nothing).

    Raises:
        ValueError: shapes, dtypes or options that do not fit together.
        NotImplementedError: the named backend cannot run this.
    """
    _check(q, pools, tables, q_pos, window, sinks)
    pools, tables = tuple(pools), tuple(tables)
    triton, xla = (
        functools.partial(backend, scale=scale, window=window)
        for backend in (paged_attention_triton, paged_attention_xla)
    )
    arrays = {"q_pos": q_pos, "sinks": sinks}
    if implementation == "triton":
        return triton(q, pools, tables, **arrays)
    if implementation not in (None, "xla"):
        raise ValueError(f"implementation must be None, 'triton' or 'xla', got {implementation!r}")
    if implementation == "xla" or unsupported(q, pools, tables):
        return xla(q, pools, tables, **arrays)

    def call(backend):
        return lambda q, pools, tables, arrays: backend(q, pools, tables, **arrays)

    return jax.lax.platform_dependent(
        q, pools, tables, arrays, cuda=call(triton), default=call(xla)
    )


def _check(q, pools, tables, q_pos, window, sinks) -> None:
    rows, heads, dim = q.shape
    if not pools or len(pools) != len(tables):
        raise ValueError(f"need one table a pool, got {len(pools)} pools, {len(tables)} tables")
    kv_heads = tables[0].shape[1]
    if heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of KV heads, got {heads=} {kv_heads=}")
    for pages, table in zip(pools, tables, strict=True):
        if table.shape[:2] != (rows, kv_heads) or not jnp.issubdtype(table.dtype, jnp.integer):
            raise ValueError(
                f"a table must be integer (rows, KV heads, pages) = ({rows}, {kv_heads}, ..), "
                f"got {table.dtype} {table.shape}"
            )
        count, page, width = pages.k.shape
        if width != dim or pages.v.shape != (count, dim, page):
            raise ValueError(
                f"pages must be k (pages, page, {dim}) and v (pages, {dim}, page), "
                f"got {pages.k.shape} and {pages.v.shape}"
            )
    if window is not None and q_pos is None:
        raise ValueError(f"{window=} needs `q_pos`, the logical position of each row's query")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must have shape ({heads},), got {sinks.shape}")
