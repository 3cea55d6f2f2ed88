"""``latent_attention`` as two Pallas-Triton kernels: blocks of keys to logits, blocks of values to
sums.

A program takes one block of one row and some of its slots, of any of the pools. Keys are rebuilt,
turned and multiplied by the queries in registers, one KV head after the other, and of a slot its
logits alone are stored, at its position, so that XLA adds up blocks that lie alike. Values are
weighted as they lie. Nothing is gathered.

Queries in bfloat16 are multiplied with bases and keys in bfloat16, and latents in bfloat16 or codes
as they are; sums are float32. Queries or latents in float32 stay as exact as that.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.einsum import tile_product
from pallas_kernels.formats import PER_BYTE, middle
from pallas_kernels.latent_attention.layout import Basis, Rotary, blocks_of
from pallas_kernels.latent_attention.xla import attend_by_position
from pallas_kernels.layout import SCRATCH_PAGE, KVPages, beyond_offsets


@dataclasses.dataclass(frozen=True)
class Launch:
    """How programs are cut.

    Attributes:
        tile: slots that are read at once; a product takes 16 at least.
        num_warps: of a program.
        num_stages: how far loads run ahead.
        chunk: components that are multiplied at once, at most; of codes, those of all planes.
    """

    tile: int
    num_warps: int
    num_stages: int
    chunk: int


LAUNCHES = {True: Launch(32, 4, 3, 64), False: Launch(128, 8, 3, 128)}
"""Of keys, by whether products are as exact as float32."""
VALUES = {True: Launch(32, 4, 3, 64), False: Launch(64, 4, 3, 128)}
SHARE = 512
"""Slots of values that a program adds up, if not told otherwise."""
FEW = 128
"""Slots of a row and block, as many or fewer, of which each KV head has a program of its own."""
_COLUMNS = 16  # a product has that many at least
_FORMATS = ("float", "int8", "int4", "int2")


def unsupported(q: Array, pools: tuple[KVPages, ...]) -> str | None:
    """Why the kernels cannot run on these shapes, None where they can."""
    for pool in pools:
        if pool.k_format not in _FORMATS:
            return f"no latents in codes of {pool.k_format}"
        if pool.page_size & (pool.page_size - 1):
            return f"the page size must be a power of two, got {pool.page_size}"
    return beyond_offsets(q, *jax.tree.leaves(pools))


def latent_attention_triton(
    q: Float[Array, "B Hq D"],
    pools: tuple[KVPages, ...],
    tables: tuple[Int[Array, "B _ _"], ...],
    keys: Basis,
    values: Basis,
    rotary: Rotary,
    *,
    scale: float,
    span: int,
    q_pos: Int[Array, " B"] | None = None,
    window: int | None = None,
    sinks: Float[Array, " Hq"] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B Hq D"], Float[Array, "B Hq"]]:
    """See ``pallas_kernels.latent_attention``.

    Raises:
        NotImplementedError: the shapes are not for these kernels.
    """
    reason = unsupported(q, pools)
    if reason:
        raise NotImplementedError(f"triton latent_attention: {reason}")
    return attend_by_position(
        q,
        pools,
        tables,
        keys,
        values,
        rotary,
        logits_of=functools.partial(latent_logits, interpret=interpret),
        sums_of=functools.partial(latent_sums, interpret=interpret),
        scale=scale,
        span=span,
        q_pos=q_pos,
        window=window,
        sinks=sinks,
    )


def latent_logits(
    q: Float[Array, "B Hkv G D"],
    pools: tuple[KVPages, ...],
    tables: tuple[Int[Array, "B _ _"], ...],
    keys: Basis,
    rotary: Rotary,
    span: int,
    *,
    launch: Launch | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B Hq L"], Bool[Array, "B L"]]:
    """``q . k`` by position, in float32, and where a token is; elsewhere it may be anything.

    Args:
        launch: instead of what is best.
    """
    rows, kv_heads, group, _ = q.shape
    width = len(keys.back)
    counts = [blocks_of(pool, table, width) for pool, table in zip(pools, tables, strict=True)]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    exact = _exact(q, pools)
    launch = launch or LAUNCHES[exact]
    dtype = jnp.float32 if exact else jnp.bfloat16
    angles = jnp.arange(span, dtype=jnp.float32)[:, None] * rotary.frequencies[None]
    shared = {
        "q": q.astype(dtype),
        "back": keys.back.astype(dtype),
        "cos": jnp.cos(angles) * rotary.factor,
        "sin": jnp.sin(angles) * rotary.factor,
    }
    shared |= {} if keys.mean is None else {"mean": keys.mean}
    bodies = []
    for pool, table, count, start in zip(pools, tables, counts, starts, strict=True):
        slots = table.shape[2] * pool.page_size
        own = dataclasses.replace(launch, tile=min(launch.tile, max(16, pl.next_power_of_2(slots))))
        each = 1 if slots <= FEW else kv_heads
        cut = count, pl.cdiv(slots, own.tile), kv_heads // each
        body = functools.partial(
            _block_logits,
            fmt=pool.k_format,
            first=start,
            each=each,
            launch=own,
            interpret=interpret,
        )
        bodies.append((cut, body))
    # Of a block that a token does not have, nothing is stored.
    marks = jnp.zeros((rows, sum(counts), span), jnp.int8)
    there, parts = _launched(
        bodies,
        [marks],
        shared,
        pools,
        tables,
        out=(rows, sum(counts), kv_heads * group, span),
        launch=launch,
        interpret=interpret,
        name="latent_logits",
    )
    there = there != 0
    logits = functools.reduce(
        jnp.add, (jnp.where(there[:, i, None], parts[:, i], 0.0) for i in range(sum(counts)))
    )
    return logits, functools.reduce(jnp.logical_or, (there[:, start] for start in starts))


def latent_sums(
    weights: Float[Array, "B Hkv G L"],
    pools: tuple[KVPages, ...],
    tables: tuple[Int[Array, "B _ _"], ...],
    width: int,
    *,
    share: int = SHARE,
    interpret: bool = False,
) -> Float[Array, "Hkv B G d"]:
    """Components of values, summed by weights by position, in float32.

    Args:
        share: slots that a program adds up, a power of two, 16 at least.
    """
    rows, kv_heads, group, _ = weights.shape
    exact = _exact(None, pools)
    launch = dataclasses.replace(VALUES[exact], tile=min(VALUES[exact].tile, share))
    bodies, shares = [], 0
    for pool, table in zip(pools, tables, strict=True):
        stored = pool.k.shape[2]
        parts = pl.cdiv(stored, _chunk(stored, pool.k_format, launch))
        cut = blocks_of(pool, table, width), parts, pl.cdiv(table.shape[2] * pool.page_size, share)
        body = functools.partial(
            _block_sums,
            fmt=pool.k_format,
            first=shares,
            size=share,
            launch=launch,
            exact=exact,
            interpret=interpret,
        )
        bodies.append((cut, body))
        shares += cut[2]
    (sums,) = _launched(
        bodies,
        [],
        {"weights": weights},
        pools,
        tables,
        out=(shares, kv_heads, rows, group, width),
        launch=launch,
        interpret=interpret,
        name="latent_values",
    )
    return sums.sum(0)


def _launched(
    bodies: list[tuple[tuple[int, int, int], Callable]],
    changed: list[Array],
    shared: dict[str, Array],
    pools: tuple[KVPages, ...],
    tables: tuple[Int[Array, "B _ _"], ...],
    *,
    out: tuple[int, ...],
    launch: Launch,
    interpret: bool,
    name: str,
) -> tuple[Array, ...]:
    """All pools' programs in one launch.

    Args:
        bodies: of each pool, how many blocks, parts and further parts its programs are cut into,
            and what one of them does, called with its row, its three numbers, what it reads, and
            the results.
        changed: arrays that are changed in place, the first of the results.
        shared: what all of them read.
        out: shape of the last result, which is new and float32.
    """
    stored = [_stored(pool, table) for pool, table in zip(pools, tables, strict=True)]
    totals = [math.prod(cut) for cut, _ in bodies]

    def program(*refs):
        shared, stored, *results = refs[len(changed) :]
        number, row = pl.program_id(0), pl.program_id(1)
        for index, (cut, body) in enumerate(bodies):
            own = number - sum(totals[:index])

            @pl.when((own >= 0) & (own < totals[index]))
            def _(own=own, cut=cut, body=body, given=shared | stored[index]):
                block, rest = own // (cut[1] * cut[2]), own % (cut[1] * cut[2])
                body(row, block, rest // cut[2], rest % cut[2], given, *results)

    return pl.pallas_call(
        program,
        grid=(sum(totals), len(tables[0])),
        in_specs=_whole([*changed, shared, stored]),
        out_specs=_whole([*changed, 0]),
        out_shape=[
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in changed),
            jax.ShapeDtypeStruct(out, jnp.float32),
        ],
        input_output_aliases={i: i for i, _ in enumerate(changed)},
        compiler_params=plt.CompilerParams(
            num_warps=launch.num_warps, num_stages=launch.num_stages
        ),
        interpret=interpret,
        name=name,
    )(*changed, shared, stored)


def _whole(tree):
    """Arrays as they are, of which programs take what they want."""
    return jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), tree)


def _exact(q: Array | None, pools: tuple[KVPages, ...]) -> bool:
    """Whether products have to be as exact as float32."""
    return (q is not None and q.dtype != jnp.bfloat16) or any(
        pool.k.dtype == jnp.float32 for pool in pools
    )


def _product(a, b, exact: bool, interpret: bool):
    return tile_product(a, b, interpret) if exact else plt.dot(a, b)


def _stored(pool: KVPages, table: Int[Array, "B N P"]) -> dict[str, Array]:
    """What a kernel reads of a pool."""
    given = {"x": pool.k, "pos": pool.pos, "table": table}
    return given if pool.k_scale is None else given | {"scale": pool.k_scale}


def _slots(given, row, line, first, tile: int):
    """Page, slot and position of a tile's slots; the scratch page, and -1, where there is none."""
    page = given["x"].shape[1]
    at = first + jnp.arange(tile)
    inside = at < given["table"].shape[2] * page
    pages = plt.load(given["table"].at[row, line, at // page], mask=inside, other=SCRATCH_PAGE)
    live = pages != SCRATCH_PAGE
    pos = plt.load(given["pos"].at[pages, at % page], mask=live, other=-1)
    return pages, at % page, pos


def _held(given, row, line, first, size: int):
    """How far the pages of a line reach, of ``size`` slots from ``first`` on."""
    page = given["x"].shape[1]
    at = first // page + jnp.arange(pl.next_power_of_2(pl.cdiv(size, page)))
    inside = (at < given["table"].shape[2]) & (at * page < first + size)
    pages = plt.load(given["table"].at[row, line, at], mask=inside, other=SCRATCH_PAGE)
    ends = jnp.where(pages != SCRATCH_PAGE, (at + 1) * page - first, 0)
    return jnp.minimum(ends.max(), size)


def _chunk(stored: int, fmt: str, launch: Launch) -> int:
    """Stored components that are multiplied at once."""
    return min(launch.chunk // PER_BYTE.get(fmt, 1), max(16, pl.next_power_of_2(stored)))


def _load(ref, *masks):
    """A tile where all masks hold, zero elsewhere; a mask of None holds everywhere."""
    masks = [mask for mask in masks if mask is not None]
    if not masks:
        return plt.load(ref)
    mask = functools.reduce(jnp.logical_and, masks)
    return plt.load(ref, mask=jnp.broadcast_to(mask, ref.shape), other=0)


def _below(index, limit: int, size: int):
    """Where ``index``, of which there are ``size``, is below the limit; None: everywhere."""
    return None if limit % size == 0 else index < limit


def _components(given, at, first, plane, fmt, chunk, dtype):
    """A tile [slots, components] of a block, before its scale: of one plane, from ``first`` on."""
    pages, slots, pos = at
    stored = given["x"].shape[2]
    channels = first + jnp.arange(chunk)
    real = _below(channels, stored, chunk)
    real = None if real is None else real[None]
    live = (pos >= 0)[:, None]
    tile = _load(given["x"].at[pages[:, None], slots[:, None], channels[None]], live, real)
    if fmt == "float":
        return tile.astype(dtype)
    bits = 8 // PER_BYTE[fmt]
    code = (tile >> (bits * plane)) & (2**bits - 1)
    there = live if real is None else live & real
    return jnp.where(there, code.astype(jnp.float32) - middle(fmt), 0.0).astype(dtype)


def _scale(given, at):
    """The scale of each slot, or None."""
    pages, slots, pos = at
    if "scale" not in given:
        return None
    where = given["scale"].at[pages, slots, 0 * slots]
    return plt.load(where, mask=pos >= 0, other=0).astype(jnp.float32)


def _block_logits(
    row, block, tile, part, given, there, out, *, fmt, first, each, launch, interpret
):
    heads = part * each
    _, _, group, dim = given["q"].shape
    at = pages, _, pos = _slots(given, row, 2 * block, tile * launch.tile, launch.tile)
    half, wide = dim // 2, max(16, pl.next_power_of_2(dim // 2))
    channels, members = jnp.arange(wide), jnp.arange(_columns(group))
    real, member = _below(channels, half, wide), members < group
    row_real = None if real is None else real[None]
    column_real = None if real is None else real[:, None]
    dtype = given["q"].dtype
    exact = dtype == jnp.float32

    @pl.when(pages.max() != SCRATCH_PAGE)
    def _():
        stored, planes = given["x"].shape[2], PER_BYTE.get(fmt, 1)
        chunk = _chunk(stored, fmt, launch)
        live = pos >= 0
        # No two slots have one place, or the interpreter would store one's over the other's.
        place = jnp.where(live, pos, out.shape[3])
        scale = _scale(given, at)
        cos, sin = (
            _load(given[name].at[pos[:, None], channels[None]], live[:, None], row_real)
            for name in ("cos", "sin")
        )

        def tiles(i):
            return [
                _components(given, at, i * chunk, plane, fmt, chunk, dtype)
                for plane in range(planes)
            ]

        alone = tiles(0) if stored <= chunk else None  # once for all heads

        @pl.when(heads == 0)
        def _():
            one = jnp.ones(place.shape, there.dtype)
            plt.store(there.at[row, first + block, place], one, mask=live)

        def of_head(head, nothing_else):
            def add(i, halves):
                """Both halves of the head's channels, as far as these components go."""
                components = i * chunk + jnp.arange(chunk)
                known = _below(components, stored, chunk)
                known = None if known is None else known[:, None]
                for plane, x in enumerate(alone or tiles(i)):
                    line = (block * planes + plane) * stored + components
                    back = (
                        _load(
                            given["back"].at[line[:, None], (head * dim + start + channels)[None]],
                            known,
                            row_real,
                        )
                        for start in (0, half)
                    )
                    halves = tuple(
                        total + _product(x, own, exact, interpret)
                        for total, own in zip(halves, back, strict=True)
                    )
                return halves

            nothing = (jnp.zeros((launch.tile, wide), jnp.float32),) * 2
            if alone:
                low, high = add(0, nothing)
            else:
                low, high = jax.lax.fori_loop(0, pl.cdiv(stored, chunk), add, nothing)
            if scale is not None:
                low, high = low * scale[:, None], high * scale[:, None]
            if "mean" in given:  # once a token: with its first block
                mean = (
                    _load(given["mean"].at[head * dim + start + channels], real)
                    for start in (0, half)
                )
                low, high = (
                    x + jnp.where(block == 0, own, 0.0)[None]
                    for x, own in zip((low, high), mean, strict=True)
                )
            turned = low * cos - high * sin, high * cos + low * sin
            dots = jnp.zeros((launch.tile, _columns(group)), jnp.float32)
            for start, key in zip((0, half), turned, strict=True):
                at_q = given["q"].at[row, head, members[None], (start + channels)[:, None]]
                query = _load(at_q, member[None], column_real)
                dots += _product(key.astype(dtype), query, exact, interpret)
            to = out.at[row, first + block, (head * group + members)[None], place[:, None]]
            plt.store(to, dots, mask=live[:, None] & member[None])
            return nothing_else

        jax.lax.fori_loop(heads, heads + each, of_head, 0)


def _columns(count: int) -> int:
    return max(_COLUMNS, pl.next_power_of_2(count))


def _block_sums(row, block, part, share, given, out, *, fmt, first, size, launch, exact, interpret):
    stored, planes = given["x"].shape[2], PER_BYTE.get(fmt, 1)
    width = _chunk(stored, fmt, launch)
    begin = part * width
    _, kv_heads, group, _ = given["weights"].shape
    lines = jnp.arange(_columns(kv_heads * group))
    head, member = lines[:, None] // group, lines[:, None] % group
    real = head < kv_heads
    dtype = jnp.float32 if exact else jnp.bfloat16

    def add(i, sums):
        at = _, _, pos = _slots(
            given, row, 2 * block + 1, share * size + i * launch.tile, launch.tile
        )
        where = given["weights"].at[row, head, member, pos[None]]
        weights = plt.load(where, mask=real & (pos >= 0)[None], other=0)
        scale = _scale(given, at)
        weights = weights if scale is None else weights * scale[None]
        top = weights.astype(dtype)
        rest = (weights - top.astype(jnp.float32)).astype(dtype)  # as exact as both together
        added = []
        for plane, total in enumerate(sums):
            x = _components(given, at, begin, plane, fmt, width, dtype)
            total += _product(top, x, exact, interpret)
            added.append(total if exact else total + _product(rest, x, exact, interpret))
        return tuple(added)

    nothing = (jnp.zeros((len(lines), width), jnp.float32),) * planes
    components = begin + jnp.arange(width)
    steps = pl.cdiv(_held(given, row, 2 * block + 1, share * size, size), launch.tile)
    for plane, total in enumerate(jax.lax.fori_loop(0, steps, add, nothing)):
        column = (block * planes + plane) * stored + components
        to = out.at[first + share, head, row, member, column[None]]
        plt.store(to, total, mask=real & (components < stored)[None])
