"""``paged_attention`` as a Pallas-Triton kernel: no gather, each live page is read once.

A program takes one row, one KV head and a share of its pages. The operands are swapped, so that a
page of keys, and a page of transposed values, is the left side of a product whose right side is as
narrow as the query group. Shares are merged in float32 afterwards.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import KVPages

NEG_INF = -1e30  # finite, so that a share with no live slot has weight zero and never NaN
PROGRAMS = 512
"""Programs to aim at: a few for each multiprocessor, also where the batch is small."""


def unsupported(
    queries: tuple[Array, ...], pools: tuple[KVPages, ...], tables: tuple[Array, ...]
) -> str | None:
    """Why the kernel cannot run on these shapes, None where it can."""
    q = queries[0]
    dim = q.shape[-1]
    group = q.shape[1] // tables[0].shape[1]
    if dim & (dim - 1) or dim < 16:
        return f"head_dim must be a power of two and at least 16, got {dim}"
    if group > 16:
        return f"at most 16 query heads may share a KV head, got {group}"
    for pages in pools:
        if not pages.plain:
            return f"keys and values must be plain numbers, got {pages.k_format}, {pages.v_format}"
        if pages.page_size & (pages.page_size - 1) or pages.page_size < 16:
            return f"the page size must be a power of two and at least 16, got {pages.page_size}"
        if pages.k.dtype != q.dtype:
            return f"queries and pages must have one dtype, got {q.dtype} and {pages.k.dtype}"
        if 2**31 <= pages.k.nbytes <= 2**32:
            return f"pools of 2 to 4 GiB overflow 32-bit offsets, got {pages.k.nbytes} bytes"
    return None


def paged_attention_triton(
    queries: tuple[Float[Array, "B Hq D"], ...],
    pools: tuple[KVPages, ...],
    tables: tuple[Int[Array, "B Hkv _"], ...],
    *,
    scale: float,
    q_pos: Int[Array, " B"] | None,
    window: int | None,
    sinks: Float[Array, " Hq"] | None,
    interpret: bool = False,
) -> tuple[Float[Array, "B Hq D"], Float[Array, "B Hq"]]:
    """See ``pallas_kernels.paged_attention``.

    Raises:
        NotImplementedError: the shapes are not for this kernel.
    """
    reason = unsupported(queries, pools, tables)
    if reason:
        raise NotImplementedError(f"triton paged_attention: {reason}")
    rows, heads = tables[0].shape[:2]
    group = queries[0].shape[1] // heads
    q_pos = jnp.zeros(rows, jnp.int32) if q_pos is None else q_pos
    shares = [
        _shares(_columns(q, heads), q_pos, pages, table, scale, window, interpret)
        for q, pages, table in zip(queries, pools, tables, strict=True)
    ]
    parts = (jnp.concatenate(part, 2)[..., :group] for part in zip(*shares, strict=True))
    out, lse = _combine(*parts, sinks)
    return out.swapaxes(2, 3).reshape(queries[0].shape), lse.reshape(queries[0].shape[:2])


def _columns(q: Float[Array, "B Hq D"], heads: int) -> Float[Array, "B Hkv D G"]:
    """The queries of each KV head side by side, padded to what a product takes."""
    grouped = q.reshape(q.shape[0], heads, -1, q.shape[2]).swapaxes(2, 3)
    group = grouped.shape[3]
    narrow = max(8, pl.next_power_of_2(group))
    return jnp.pad(grouped, ((0, 0), (0, 0), (0, 0), (0, narrow - group)))


def _shares(columns, q_pos, pages: KVPages, table, scale, window, interpret):
    """Unnormalised output [B, Hkv, N, D, G], top logit and mass [B, Hkv, N, G] of N shares."""
    rows, heads, dim, narrow = columns.shape
    width = table.shape[2]
    share = -(-width // min(width, max(1, PROGRAMS // (rows * heads))))
    count = -(-width // share)
    mass = jax.ShapeDtypeStruct((rows, heads, count, narrow), jnp.float32)
    out = jax.ShapeDtypeStruct((rows, heads, count, dim, narrow), jnp.float32)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    kernel = functools.partial(_attend, share=share, width=width, scale=scale, window=window)
    return pl.pallas_call(
        kernel,
        grid=(rows, heads, count),
        in_specs=[whole] * 7,
        out_specs=[whole] * 3,
        out_shape=[out, mass, mass],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="paged_attention",
    )(table, q_pos, columns, pages.k, pages.v, pages.bias, pages.pos)


def _attend(
    table, q_pos, q, k, v, bias, pos, out, out_top, out_total, *, share, width, scale, window
):
    row, head, part = (pl.program_id(axis) for axis in range(3))
    columns = q[row, head, :, :]  # [D, G]
    dot = functools.partial(plt.dot, precision=_precision(columns.dtype))
    first = part * share

    def step(i, carry):
        out, top, total = carry
        page = table[row, head, first + i]
        mark = bias[page, :]
        live = mark > NEG_INF
        if window is not None:
            live &= q_pos[row] - pos[page, :] < window
        live = live[:, None]
        logits = dot(k[page, :, :], columns) * jnp.float32(scale) + mark[:, None]
        logits = jnp.where(live, logits, jnp.float32(NEG_INF))  # [slots, G]
        new_top = jnp.maximum(top, logits.max(0))
        weights = jnp.where(live, jnp.exp(logits - new_top[None]), jnp.float32(0))
        fade = jnp.exp(top - new_top)
        out = out * fade[None] + dot(v[page, :, :], weights.astype(v.dtype))
        return out, new_top, total * fade + weights.sum(0)

    start = (
        jnp.zeros(columns.shape, jnp.float32),
        jnp.full(columns.shape[1:], NEG_INF, jnp.float32),
        jnp.zeros(columns.shape[1:], jnp.float32),
    )
    steps = jnp.minimum(share, width - first)
    out[row, head, part, :, :], out_top[row, head, part, :], out_total[row, head, part, :] = (
        jax.lax.fori_loop(0, steps, step, start)
    )


def _precision(dtype) -> jax.lax.DotAlgorithmPreset | None:
    """Float32 products of float32 operands, which the hardware would round to TF32."""
    return jax.lax.DotAlgorithmPreset.F32_F32_F32 if dtype == jnp.float32 else None


def _combine(out, top, total, sinks):
    """Merge the shares: output [B, Hkv, D, G] and log-sum-exp [B, Hkv, G]."""
    best = top.max(2)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, *best.shape[1:])
        best = jnp.maximum(best, sink)
    weight = jnp.exp(top - best[:, :, None])
    mass = (total * weight).sum(2)
    if sinks is not None:
        mass += jnp.exp(sink - best)
    some = mass > 0
    mass = jnp.where(some, mass, 1.0)
    lse = jnp.where(some, best + jnp.log(mass), -jnp.inf)
    return (out * weight[:, :, :, None]).sum(2) / mass[:, :, None], lse
