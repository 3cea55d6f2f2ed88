"""The public op: what goes in is checked here, then a backend computes it."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.formats import PER_BYTE
from pallas_kernels.layout import KVPages
from pallas_kernels.paged_attention.hopper import plan
from pallas_kernels.paged_attention.mosaic import other_device, paged_attention_mosaic
from pallas_kernels.paged_attention.triton import paged_attention_triton, unsupported
from pallas_kernels.paged_attention.xla import paged_attention_xla

Implementation = Literal["mosaic", "triton", "xla"]
LARGE = 256 * 2**20
"""Bytes of keys and values in codes that tables can name, from which Mosaic's kernel is faster: its
launches are not part of command buffers, and a few microseconds longer for that."""


def paged_attention(
    q: Float[Array, "B Hq D"] | Sequence[Float[Array, "B Hq D"]],
    pools: Sequence[KVPages],
    tables: Sequence[Int[Array, "B Hkv _"]],
    *,
    scale: float,
    q_pos: Int[Array, " B"] | None = None,
    window: int | None = None,
    sinks: Float[Array, " Hq"] | None = None,
    soft_cap: float | None = None,
    with_mass: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Any, ...]:
    """Softmax attention of one query a row over the live slots of its pages, in one softmax.

    Query head ``h`` reads KV head ``h // (Hq // Hkv)``. A slot's logit is ``q . k * scale + bias``,
    or ``soft_cap * tanh(q . k * scale / soft_cap) + bias``.

    Args:
        q: queries with their rotary position applied, as the model made them; or one for each pool,
            where the pools see the query at different positions.
        pools: one pool for each codec class.
        tables: for each pool, the pages of every row and KV head, padded with ``SCRATCH_PAGE``.
        scale: multiplies ``q . k``.
        q_pos: logical position of each row's query; needed with ``window`` alone.
        window: if given, only slots with ``q_pos - pos < window`` are seen.
        sinks: a learned logit for each query head that takes mass and has no value (GPT-OSS).
        soft_cap: if given, what logits stay below, but for biases and sinks (Gemma 2).
        with_mass: also return the attention that every slot received.
        implementation: a backend by name, which fails loudly where it cannot run: "mosaic" on
            GPUs of compute capability 9.0, "triton" from 8.0 on, "xla" anywhere. ``None`` takes
            on NVIDIA GPUs "mosaic" for `LARGE` pools of codes and else "triton", where those can
            run, and "xla" otherwise.

    Returns:
        The float32 output, zero for a row without live slots, and the float32 log-sum-exp of its
        logits, sink included (``-inf`` where there is nothing). With ``with_mass`` also, for each
        pool, the weight of every slot that its table names, float32 [B, Hkv, pages * page], summed
        over the query heads of its group.

    Raises:
        ValueError: shapes, dtypes or options that do not fit together.
        NotImplementedError: the named backend cannot run this.
    """
    queries = tuple([q] * len(pools) if isinstance(q, jax.Array) else q)
    _check(queries, pools, tables, q_pos, window, sinks)
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive, got {soft_cap}")
    arguments = queries, tuple(pools), tuple(tables), {"q_pos": q_pos, "sinks": sinks}

    def backend(function):
        def call(queries, pools, tables, arrays):
            options = {"scale": scale, "window": window, "soft_cap": soft_cap}
            return function(queries, pools, tables, with_mass=with_mass, **options, **arrays)

        return call

    if implementation == "mosaic":
        return backend(paged_attention_mosaic)(*arguments)
    triton, xla = backend(paged_attention_triton), backend(paged_attention_xla)
    if implementation == "triton":
        return triton(*arguments)
    if implementation not in (None, "xla"):
        names = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"implementation must be None or one of {names}, got {implementation!r}")
    fastest = triton
    if implementation is None and not with_mass and _suits_mosaic(*arguments[:3]):
        fastest = backend(paged_attention_mosaic)
    elif implementation == "xla" or unsupported(*arguments[:3]):
        return xla(*arguments)
    return jax.lax.platform_dependent(*arguments, cuda=fastest, default=xla)


def _suits_mosaic(queries, pools, tables) -> bool:
    coded = sum(
        table.size * (pages.k.nbytes + pages.v.nbytes) // len(pages.k)
        for pages, table in zip(pools, tables, strict=True)
        if not pages.plain
    )
    return coded >= LARGE and not (other_device() or plan.unsupported(queries, pools, tables))


def missing_device(implementation: Implementation | None) -> str | None:
    """What a backend needs and this machine's first device is not; None where it is."""
    if implementation == "triton" and jax.default_backend() != "gpu":
        return "needs an NVIDIA GPU, and JAX sees none"
    return other_device() if implementation == "mosaic" else None


def _check(queries, pools, tables, q_pos, window, sinks) -> None:
    if not pools or not len(pools) == len(tables) == len(queries):
        raise ValueError(
            f"need one table (and one query, if several) a pool, got {len(pools)} pools, "
            f"{len(tables)} tables, {len(queries)} queries"
        )
    rows, heads, dim = queries[0].shape
    if any(q.shape != queries[0].shape or q.dtype != queries[0].dtype for q in queries):
        raise ValueError(f"queries must agree, got {[(q.shape, q.dtype) for q in queries]}")
    kv_heads = tables[0].shape[1]
    if heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of KV heads, got {heads=} {kv_heads=}")
    for pages, table in zip(pools, tables, strict=True):
        if table.shape[:2] != (rows, kv_heads) or not jnp.issubdtype(table.dtype, jnp.integer):
            raise ValueError(
                f"a table must be integer (rows, KV heads, pages) = ({rows}, {kv_heads}, ..), "
                f"got {table.dtype} {table.shape}"
            )
        count, page = pages.k.shape[:2]
        k, v = ((dim // PER_BYTE.get(fmt, 1)) for fmt in (pages.k_format, pages.v_format))
        if pages.k.shape[2] != k or pages.v.shape != (count, v, page):
            raise ValueError(
                f"pages must be k (pages, page, {k}) and v (pages, {v}, page) for {dim=} "
                f"{pages.k_format=} {pages.v_format=}, got {pages.k.shape} and {pages.v.shape}"
            )
    if window is not None and q_pos is None:
        raise ValueError(f"{window=} needs `q_pos`, the logical position of each row's query")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must have shape ({heads},), got {sinks.shape}")
