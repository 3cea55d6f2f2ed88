"""The public op: what goes in is checked here, then a backend computes it."""

from collections.abc import Callable, Sequence
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import KVPages
from pallas_kernels.paged_attention.xla import paged_attention_xla

Implementation = Literal["xla"]

BACKENDS: dict[str, Callable] = {"xla": paged_attention_xla}


def paged_attention(
    q: Float[Array, "B Hq D"],
    pools: Sequence[KVPages],
    tables: Sequence[Int[Array, "B Hkv P"]],
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
        implementation: a backend by name, which fails loudly where it cannot run; ``None`` picks.

    Returns:
        The float32 output, zero for a row without live slots, and the float32 log-sum-exp of its
        logits, sink included (``-inf`` where there is nothing).

    Raises:
        ValueError: shapes, dtypes or options that do not fit together.
        NotImplementedError: the named backend cannot run this.
    """
    _check(q, pools, tables, q_pos, window, sinks)
    name = implementation or "xla"
    if name not in BACKENDS:
        raise ValueError(f"implementation must be None or one of {list(BACKENDS)}, got {name!r}")
    return BACKENDS[name](
        q, tuple(pools), tuple(tables), scale=scale, q_pos=q_pos, window=window, sinks=sinks
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
