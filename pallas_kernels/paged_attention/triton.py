"""``paged_attention`` as a Pallas-Triton kernel: no gather, each live page is read once, as codes.

A program takes one row, one KV head and a share of its pages. The operands are swapped, so that a
page of keys, and a page of transposed values, is the left side of a product whose right side is as
narrow as the query group. Shares are merged in float32 afterwards. ``operands`` says how codes are
multiplied without becoming numbers first.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import SCRATCH_PAGE, KVPages, beyond_offsets
from pallas_kernels.paged_attention.operands import FORMATS, LOWEST, NEG_INF, Codes, Numbers, Place
from pallas_kernels.read import coded_queries
from pallas_kernels.rotation import unrotate

LOG2E = math.log2(math.e)  # logits are kept times this: a GPU has an instruction for 2**x alone


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a pool is read; docs/kernels.md has what was tried.

    Attributes:
        programs: to aim at, in all.
        slots: read at a time, of one page or several.
        num_warps: of a program. With one, no step waits for another warp.
        num_stages: how far loads run ahead. A page's number is loaded before the page, so that it
            takes six for the next tile to be on its way while one is read.
    """

    programs: int = 1024
    slots: int = 64
    num_warps: int = 1
    num_stages: int = 3


def unsupported(
    queries: tuple[Array, ...], pools: tuple[KVPages, ...], tables: tuple[Array, ...]
) -> str | None:
    """Why the kernel cannot run on these shapes, None where it can."""
    q = queries[0]
    group = q.shape[1] // tables[0].shape[1]
    if group > 16:
        return f"at most 16 query heads may share a KV head, got {group}"
    for pages in pools:
        page = pages.page_size
        for fmt, scale, zero, one in (
            (pages.k_format, pages.k_scale, pages.k_zero, (page, 1)),
            (pages.v_format, pages.v_scale, pages.v_zero, (1, page)),
        ):
            if fmt not in FORMATS or zero is not None:
                return f"no codes of {fmt}{'' if zero is None else ' with a zero point'}"
            if scale is not None and scale.shape[1:] != one:
                return f"codes need one scale a slot, got {scale.shape} for pages of {page}"
        if page & (page - 1) or page < 16:
            return f"the page size must be a power of two and at least 16, got {page}"
        for array, fmt in ((pages.k, pages.k_format), (pages.v, pages.v_format)):
            if fmt == "float" and array.dtype != q.dtype:
                return f"queries and pages must have one dtype, got {q.dtype} and {array.dtype}"
    return beyond_offsets(*queries, *jax.tree.leaves(pools))


def paged_attention_triton(
    queries: tuple[Float[Array, "B Hq D"], ...],
    pools: tuple[KVPages, ...],
    tables: tuple[Int[Array, "B Hkv _"], ...],
    *,
    scale: float,
    q_pos: Int[Array, " B"] | None,
    window: int | None,
    sinks: Float[Array, " Hq"] | None,
    soft_cap: float | None = None,
    with_mass: bool = False,
    launch: Launch | None = None,
    interpret: bool = False,
) -> tuple:
    """See ``pallas_kernels.paged_attention``.

    Raises:
        NotImplementedError: the shapes are not for this kernel.
    """
    reason = unsupported(queries, pools, tables)
    if reason:
        raise NotImplementedError(f"triton paged_attention: {reason}")
    shares = functools.partial(
        _shares,
        scale=scale,
        q_pos=q_pos,
        window=window,
        soft_cap=soft_cap,
        with_mass=with_mass,
        interpret=interpret,
    )
    parts = [
        shares(*coded_queries(pages, q), pages, table, launch=launch or _launch(pages))
        for q, pages, table in zip(queries, pools, tables, strict=True)
    ]
    rotated = [pages.rotated for pages in pools]
    out, lse = combine(parts, rotated, queries[0], sinks)
    return (out, lse, _masses(parts, tables, lse)) if with_mass else (out, lse)


def _launch(pages: KVPages) -> Launch:
    """The fastest on an H200."""
    if pages.k_format == pages.v_format == "float":
        return Launch(num_warps=4)
    slot = (pages.k.nbytes + pages.v.nbytes) // pages.bias.size
    return Launch(num_stages=6 if slot <= 96 else 3)


# Compiled by itself, so that equal layers trace it once.
@functools.partial(
    jax.jit,
    static_argnames=("launch", "window", "soft_cap", "with_mass", "scale", "interpret"),
)
def _shares(
    q,
    offset,
    pages: KVPages,
    table,
    *,
    launch,
    q_pos,
    window,
    soft_cap,
    with_mass,
    scale,
    interpret,
):
    """What N programs each found in their share of the pages of a row and KV head.

    Returns:
        ``out`` [B, Hkv, N, G, D], not divided by the mass; ``top`` and ``total`` [B, Hkv, N, G],
        the top logit and the mass in units of it; with mass also ``logits`` [B, Hkv, slots, G].
    """
    rows, kv_heads, width = table.shape
    heads, dim = q.shape[1:]
    group = heads // kv_heads
    steps = -(-width * pages.page_size // launch.slots)
    count = min(steps, max(1, launch.programs // (rows * kv_heads)))
    arrays = {"table": table, "q": q, "k": pages.k, "v": pages.v, "bias": pages.bias}
    for name in ("k_scale", "v_scale"):
        if getattr(pages, name) is not None:
            arrays[name] = getattr(pages, name).reshape(pages.bias.shape)
    if window is not None:
        arrays |= {"q_pos": q_pos, "pos": pages.pos}
    if offset is not None:
        arrays["offset"] = offset

    def array(*shape):
        return jax.ShapeDtypeStruct((rows, kv_heads, *shape), jnp.float32)

    out = {
        "out": array(count, group, dim),
        "top": array(count, group),
        "total": array(count, group),
    }
    if with_mass:
        out["logits"] = array(width * pages.page_size, group)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    kernel = functools.partial(
        _attend,
        formats=(pages.k_format, pages.v_format),
        count=count,
        slots=launch.slots,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        interpret=interpret,
    )
    return pl.pallas_call(
        kernel,
        grid=(rows, kv_heads, count),
        in_specs=[jax.tree.map(lambda _: whole, arrays)],
        out_specs=jax.tree.map(lambda _: whole, out),
        out_shape=out,
        compiler_params=plt.CompilerParams(
            num_warps=launch.num_warps, num_stages=launch.num_stages
        ),
        interpret=interpret,
        name="paged_attention",
    )(arrays)


def _attend(refs, outs, *, formats, count, slots, scale, window, soft_cap, interpret):
    row, head, part = (pl.program_id(axis) for axis in range(3))
    table, page = refs["table"], refs["bias"].shape[1]
    width = table.shape[2]
    group, dim = outs["out"].shape[3:]
    k_side, v_side = (
        (Numbers if fmt == "float" else Codes)(fmt, dim, refs[name].dtype, interpret)
        for fmt, name in zip(formats, "kv", strict=True)
    )
    columns = jnp.arange(max(k_side.narrowest, v_side.narrowest, pl.next_power_of_2(group)))
    real = columns < group

    def query(channels):
        """A plane of the queries, [channels, columns] in float32."""
        where = refs["q"].at[row, (head * group + columns)[None], channels[:, None]]
        mask = real[None] & (channels[:, None] < dim)
        return plt.load(where, mask=mask, other=0).astype(jnp.float32)

    query = k_side.queries(query, scale * LOG2E)
    shift = None
    if "offset" in refs:
        where = refs["offset"].at[row, head * group + columns]
        shift = plt.load(where, mask=real, other=0) * jnp.float32(scale * LOG2E)

    everywhere = jnp.arange(pl.next_power_of_2(width))
    ids = plt.load(table.at[row, head, everywhere], mask=everywhere < width, other=SCRATCH_PAGE)
    used = jnp.where(ids != SCRATCH_PAGE, everywhere + 1, 0).max()
    steps = pl.cdiv(used * page, slots)
    share = pl.cdiv(steps, count)
    first = part * share

    def step(i, carry):
        sums, top, total = carry
        place = _place(table, row, head, i, page, slots)

        def vector(name):
            return place.vector(refs[name])

        mark = vector("bias")
        live = mark > LOWEST
        if window is not None:
            live &= refs["q_pos"][row] - vector("pos") < window

        def scales(name):
            # Those of free slots may hold anything.
            found = vector(name).astype(jnp.float32) if name in refs else None
            return None if found is None else jnp.where(live, found, 0)

        mark = jnp.where(live, mark * jnp.float32(LOG2E), jnp.float32(NEG_INF))[:, None]
        added = mark if soft_cap is None else jnp.zeros_like(mark)
        if shift is not None:
            added = added + shift[None]
        # [slots, columns]
        logits = k_side.times_query(refs["k"], place, query, scales("k_scale"), added)
        if soft_cap is not None:
            top_logit = jnp.float32(soft_cap * LOG2E)
            capped = jnp.tanh(logits * (1 / top_logit)) * top_logit
            logits = jnp.where(live[:, None], capped + mark, mark)
        if "logits" in outs:
            at = (i * slots + jnp.arange(slots))[:, None]
            where = outs["logits"].at[row, head, at, columns[None]]
            plt.store(where, logits, mask=real[None] & (at < width * page))
        new_top = jnp.maximum(top, logits.max(0))
        weights = jnp.exp2(logits - new_top[None])
        fade = jnp.exp2(top - new_top)
        total = total * fade + weights.sum(0)
        v_scale = scales("v_scale")
        if v_scale is not None:
            weights *= v_scale[:, None]
        return v_side.add_weighted(refs["v"], place, weights, sums, fade), new_top, total

    narrow = columns.shape
    start = (
        v_side.start(*narrow),
        jnp.full(narrow, LOWEST, jnp.float32),
        jnp.zeros(narrow, jnp.float32),
    )
    sums, top, total = jax.lax.fori_loop(first, jnp.minimum(first + share, steps), step, start)
    for channels, mine in zip(v_side.channels(), sums, strict=True):
        where = outs["out"].at[row, head, part, columns[None], channels[:, None]]
        plt.store(where, mine, mask=(channels < dim)[:, None] & real[None])
    for name, value in (("top", top), ("total", total)):
        plt.store(outs[name].at[row, head, part, columns], value, mask=real)


def _place(table, row, head, step, page, slots) -> Place:
    """Where the slots of a step are: part of a page, a page, or several."""
    if page >= slots:
        parts = page // slots
        return Place(table[row, head, step // parts], step % parts * slots + jnp.arange(slots))
    pages = step * (slots // page) + jnp.arange(slots // page)
    there = pages < table.shape[2]
    ids = plt.load(table.at[row, head, pages], mask=there, other=SCRATCH_PAGE)
    return Place(ids, jnp.arange(page))


def combine(parts, rotated, q, sinks):
    """Merge shares: the output, and the log-sum-exp of the logits.

    Args:
        parts: what ``_shares`` returns, of each pool or of several together.
        rotated: for each, whether its sums have to be turned back.
        q: the queries, for their shape.
    """
    kv_heads = parts[0]["top"].shape[1]
    tops = [part["top"].max(2) for part in parts]
    best = functools.reduce(jnp.maximum, tops)  # [B, Hkv, G]
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, kv_heads, -1) * LOG2E
        best = jnp.maximum(best, sink)
    total = 0.0 if sinks is None else jnp.exp2(sink - best)
    # The only share's top is the best one. XLA then needs no launch to make the total first.
    alone = sinks is None and len(parts) == 1 and parts[0]["top"].shape[2] == 1
    sums = {}
    for part, turned in zip(parts, rotated, strict=True):
        top = part["top"]
        weight = jnp.ones_like(top) if alone else jnp.exp2(top - best[:, :, None])
        total += (part["total"] * weight).sum(2)
        sums[turned] = sums.get(turned, 0.0) + (part["out"] * weight[..., None]).sum(2)
    out = sums.get(False, 0.0) + (unrotate(sums[True]) if True in sums else 0.0)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    lse = jnp.where(some, best + jnp.log2(total), -jnp.inf)
    return (out / total[..., None]).reshape(q.shape), (lse / LOG2E).reshape(q.shape[:2])


def _masses(parts, tables, lse):
    """The weight of every slot that a table names, summed over the group."""
    found = []
    for part, table in zip(parts, tables, strict=True):
        top = jnp.where(jnp.isneginf(lse), 0, lse * LOG2E).reshape(*table.shape[:2], 1, -1)
        share = jnp.exp2(part["logits"] - top).sum(3)
        named = jnp.repeat(table != SCRATCH_PAGE, share.shape[2] // table.shape[2], axis=2)
        found.append(jnp.where(named, share, 0))
    return tuple(found)
