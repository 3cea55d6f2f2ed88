"""``latent_attention`` as two Pallas-Triton kernels: blocks of keys to logits, blocks of values to
sums.

A program takes one block of one row and some of its slots. Keys are rebuilt, turned and multiplied
by the queries in registers, one KV head after the other, and of a slot its logits alone are stored,
which XLA adds up by position. Values are weighted as they lie. Nothing is gathered.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.einsum import tile_product
from pallas_kernels.formats import PER_BYTE, middle
from pallas_kernels.latent_attention.layout import Basis, Rotary, blocks_of
from pallas_kernels.latent_attention.xla import attend_by_position, where
from pallas_kernels.layout import SCRATCH_PAGE, KVPages, beyond_offsets

TILE = 32
"""Slots that are read at once; a product takes 16 at least."""
SHARE = 4
"""Tiles of values that a program adds up."""
CHUNK = 64
"""Stored components that are multiplied at once: a block of recent latents has all of them."""
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
        add_logits=functools.partial(_add_logits, interpret=interpret),
        weighted=functools.partial(_weighted, interpret=interpret),
        scale=scale,
        span=span,
        q_pos=q_pos,
        window=window,
        sinks=sinks,
    )


def _add_logits(logits, q, pool, table, keys: Basis, rotary: Rotary, *, interpret: bool):
    rows, heads, _ = logits.shape
    count = blocks_of(pool, table, len(keys.back))
    slots = table.shape[2] * pool.page_size
    whole = pl.BlockSpec(memory_space=pl.ANY)
    given = {"q": q, "x": pool.k, "pos": pool.pos, "scale": pool.k_scale, "table": table}
    given |= {"back": keys.back, "mean": keys.mean, "frequencies": rotary.frequencies}
    given = {name: array for name, array in given.items() if array is not None}
    found = pl.pallas_call(
        functools.partial(
            _block_logits, fmt=pool.k_format, factor=rotary.factor, interpret=interpret
        ),
        grid=(rows, count, pl.cdiv(slots, TILE)),
        in_specs=[jax.tree.map(lambda _: whole, given)],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((rows, count, heads, slots), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
        name="latent_logits",
    )(given)
    for block in range(count):
        pos = pool.pos[table[:, 2 * block]].reshape(rows, slots)
        # What is stored of slots without a token is nothing, and goes nowhere.
        logits = logits.at[where(pos, logits)].add(
            found[:, block].swapaxes(1, 2), mode="drop", unique_indices=True
        )
    return logits


def _weighted(weights, pool, table, width: int, *, interpret: bool):
    rows, heads, _ = weights.shape
    count = blocks_of(pool, table, width)
    shares = pl.cdiv(table.shape[2] * pool.page_size, TILE * SHARE)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    given = {"x": pool.k, "pos": pool.pos, "scale": pool.k_scale, "table": table}
    given = {name: array for name, array in given.items() if array is not None}
    found = pl.pallas_call(
        functools.partial(_block_sums, fmt=pool.k_format, interpret=interpret),
        grid=(rows, count * pl.cdiv(pool.k.shape[2], _chunk(pool.k.shape[2])), shares),
        in_specs=[jax.tree.map(lambda _: whole, given | {"weights": weights})],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((rows, count, shares, width // count, heads), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
        name="latent_values",
    )(given | {"weights": weights})
    return found.sum(2).reshape(rows, width, heads).swapaxes(1, 2)


def _slots(given, row, line, first):
    """Page, slot and position of a tile's slots; the scratch page, and -1, where there is none."""
    page = given["x"].shape[1]
    at = first + jnp.arange(TILE)
    inside = at < given["table"].shape[2] * page
    pages = plt.load(given["table"].at[row, line, at // page], mask=inside, other=SCRATCH_PAGE)
    live = pages != SCRATCH_PAGE
    pos = plt.load(given["pos"].at[pages, at % page], mask=live, other=-1)
    return pages, at % page, pos


def _chunk(stored: int) -> int:
    return min(CHUNK, max(16, pl.next_power_of_2(stored)))


def _components(given, pages, slots, pos, first, plane, fmt):
    """A tile [slots, components] of a block: of one plane, from stored component ``first`` on."""
    stored = given["x"].shape[2]
    channels = first + jnp.arange(_chunk(stored))
    there = (pos >= 0)[:, None] & (channels < stored)[None]
    at = given["x"].at[pages[:, None], slots[:, None], channels[None]]
    tile = plt.load(at, mask=there, other=0)
    if fmt == "float":
        return tile.astype(jnp.float32)
    scale = plt.load(given["scale"].at[pages, slots, 0 * slots], mask=pos >= 0, other=0)
    bits = 8 // PER_BYTE[fmt]
    code = (tile >> (bits * plane)) & (2**bits - 1)
    number = (code.astype(jnp.float32) - middle(fmt)) * scale.astype(jnp.float32)[:, None]
    return jnp.where(there, number, 0.0)


def _block_logits(given, out, *, fmt, factor, interpret):
    row, block, first = pl.program_id(0), pl.program_id(1), pl.program_id(2) * TILE
    pages, slots, pos = _slots(given, row, 2 * block, first)
    _, kv_heads, group, dim = given["q"].shape
    half, wide = dim // 2, max(16, pl.next_power_of_2(dim // 2))
    channels = jnp.arange(wide)
    there, at = channels < half, first + jnp.arange(TILE)
    inside = at < out.shape[3]

    @pl.when(pages.max() != SCRATCH_PAGE)
    def _():
        stored, planes = given["x"].shape[2], PER_BYTE.get(fmt, 1)
        turn = plt.load(given["frequencies"].at[channels], mask=there, other=0)
        angles = pos.astype(jnp.float32)[:, None] * turn[None]
        cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor

        def of_head(head, _):
            def add(i, halves):
                """Both halves of the head's channels, as far as these components go."""
                chunk = i * _chunk(stored) + jnp.arange(_chunk(stored))
                for plane in range(planes):
                    tile = _components(given, pages, slots, pos, i * _chunk(stored), plane, fmt)
                    line = (block * planes + plane) * stored + chunk
                    real = (chunk < stored)[:, None] & there[None]
                    back = (
                        plt.load(
                            given["back"].at[line[:, None], (head * dim + start + channels)[None]],
                            mask=real,
                            other=0,
                        )
                        for start in (0, half)
                    )
                    halves = tuple(
                        total + tile_product(tile, own, interpret)
                        for total, own in zip(halves, back, strict=True)
                    )
                return halves

            nothing = (jnp.zeros((TILE, wide), jnp.float32),) * 2
            low, high = jax.lax.fori_loop(0, pl.cdiv(stored, _chunk(stored)), add, nothing)
            if "mean" in given:  # once a token: with its first block
                mean = (
                    plt.load(given["mean"].at[head * dim + start + channels], mask=there, other=0)
                    for start in (0, half)
                )
                low, high = (
                    x + jnp.where(block == 0, own, 0.0)[None]
                    for x, own in zip((low, high), mean, strict=True)
                )
            low, high = low * cos - high * sin, high * cos + low * sin
            for member in range(group):
                dots = jnp.zeros(TILE, jnp.float32)
                for start, key in ((0, low), (half, high)):
                    at_q = given["q"].at[row, head, member, start + channels]
                    dots += (key * plt.load(at_q, mask=there, other=0)[None]).sum(1)
                to = out.at[row, block, head * group + member, at]
                plt.store(to, dots, mask=inside)
            return 0

        jax.lax.fori_loop(0, kv_heads, of_head, 0)


def _block_sums(given, out, *, fmt, interpret):
    row, part, share = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    stored, planes = given["x"].shape[2], PER_BYTE.get(fmt, 1)
    chunks, width = pl.cdiv(stored, _chunk(stored)), _chunk(stored)
    block, first = part // chunks, part % chunks * width
    heads = given["weights"].shape[1]
    wide = max(16, pl.next_power_of_2(heads))
    columns = jnp.arange(wide)

    def add(i, sums):
        pages, slots, pos = _slots(given, row, 2 * block + 1, (share * SHARE + i) * TILE)
        live = (pos >= 0)[:, None] & (columns < heads)[None]
        at = given["weights"].at[row, columns[None], pos[:, None]]
        weights = plt.load(at, mask=live, other=0)
        return tuple(
            total
            + tile_product(
                _components(given, pages, slots, pos, first, plane, fmt).T, weights, interpret
            )
            for plane, total in enumerate(sums)
        )

    nothing = (jnp.zeros((width, wide), jnp.float32),) * planes
    channels = first + jnp.arange(width)
    for plane, total in enumerate(jax.lax.fori_loop(0, SHARE, add, nothing)):
        to = out.at[row, block, share, (plane * stored + channels)[:, None], columns[None]]
        plt.store(to, total, mask=(channels < stored)[:, None] & (columns < heads)[None])
