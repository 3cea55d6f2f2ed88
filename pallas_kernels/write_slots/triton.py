"""``write_slots`` as one Pallas-Triton launch that also codes what it stores.

A program takes some tokens of one row and KV head. Their channels come in chunks of equal width, so
that the codes of a byte lie in different chunks and no tile has to be taken apart. To be rotated,
chunks are added and subtracted first, and then multiplied by a matrix as wide as one of them, for
Hadamard's matrix is ``[[H, H], [H, -H]]`` of the one half as wide.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.einsum import tile_product
from pallas_kernels.formats import PER_BYTE, merge
from pallas_kernels.layout import SCRATCH_PAGE, UNKNOWN_LEVEL, KVPages, beyond_offsets
from pallas_kernels.rotation import rotation
from pallas_kernels.uniform import encode_uniform

_TILE = 16  # tokens of a program, and the fewest that a product takes
_WIDEST = 64  # channels of a chunk that is rotated


def unsupported(pool: KVPages, k: Array, v: Array) -> str | None:
    """Why the kernel cannot store such tokens, None where it can."""
    dim = k.shape[-1]
    if v.shape[-1] != dim:
        return f"keys of {dim} channels, and values of {v.shape[-1]}"
    if not pool.uniform:
        return f"slots share scales, or have a zero point, for {pool.k_format} and {pool.v_format}"
    if not pool.plain and (dim & (dim - 1) or dim < 16 * _planes(pool)):
        return f"codes need a head_dim that is a power of two and {16 * _planes(pool)}, got {dim}"
    return beyond_offsets(k, v, *jax.tree.leaves(pool))


def write_slots_triton(
    pool: KVPages,
    pages: Int[Array, "B Hkv T"],
    slots: Int[Array, "B Hkv T"],
    k: Float[Array, "B Hkv T D"],
    v: Float[Array, "B Hkv T D"],
    pos: Int[Array, "B T"],
    mass: Float[Array, "B Hkv T"] | None = None,
    *,
    num_warps: int | None = None,
    interpret: bool = False,
) -> KVPages:
    """See ``pallas_kernels.write_slots``; takes no codes that are made already.

    Nothing is written for a token of the scratch page.

    Args:
        num_warps: of a program; None for one where nothing is coded, and else four.

    Raises:
        NotImplementedError: the pool or the head size is not for this kernel.
    """
    reason = unsupported(pool, k, v)
    if reason:
        raise NotImplementedError(f"triton write_slots: {reason}")
    rows, heads, tokens, dim = k.shape
    width = pl.next_power_of_2(dim) if pool.plain else min(_WIDEST, dim // _planes(pool))
    tile = min(_TILE, pl.next_power_of_2(tokens)) if pool.plain else _TILE
    given = {"pages": pages, "slots": slots, "k": k, "v": v, "pos": pos, "mass": mass}
    given |= {"mean": pool.mean, "balance": pool.balance}
    given["rotation"] = jnp.asarray(rotation(width)) if pool.rotated else None
    names = ("k", "v", "bias", "pos", "k_scale", "v_scale", "mass", "level")
    held = {name: getattr(pool, name) for name in names}
    given, held = ({n: x for n, x in arrays.items() if x is not None} for arrays in (given, held))
    whole = pl.BlockSpec(memory_space=pl.ANY)
    stored = pl.pallas_call(
        functools.partial(
            _store,
            tile=tile,
            width=width,
            formats={"k": pool.k_format, "v": pool.v_format},
            interpret=interpret,
        ),
        grid=(rows, heads, pl.cdiv(tokens, tile)),
        in_specs=[jax.tree.map(lambda _: whole, arrays) for arrays in (given, held)],
        out_specs=jax.tree.map(lambda _: whole, held),
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), held),
        # What is not stored to survives.
        input_output_aliases={len(given) + i: i for i in range(len(held))},
        compiler_params=plt.CompilerParams(num_warps=num_warps or (1 if pool.plain else 4)),
        interpret=interpret,
        name="write_slots",
    )(given, held)
    return dataclasses.replace(pool, **stored)


def _planes(pool: KVPages) -> int:
    return max(PER_BYTE.get(fmt, 1) for fmt in (pool.k_format, pool.v_format))


def _store(given, _, pool, *, tile, width, formats, interpret):
    row, head = pl.program_id(0), pl.program_id(1)
    at = pl.program_id(2) * tile + jnp.arange(tile)
    inside = at < given["k"].shape[2]
    page = plt.load(given["pages"].at[row, head, at], mask=inside, other=SCRATCH_PAGE)
    # Every class is shown all tokens, and most take none of a tile.
    pl.when(page.max() > SCRATCH_PAGE)(
        lambda: _store_tile(given, pool, row, head, at, page, width, formats, interpret)
    )


def _store_tile(given, pool, row, head, at, page, width, formats, interpret):
    dim, tile = given["k"].shape[3], len(at)
    kept = page != SCRATCH_PAGE
    slot = plt.load(given["slots"].at[row, head, at], mask=kept, other=0)
    chunks = [jnp.arange(width) + first for first in range(0, dim, width)]

    def there(channels):
        return kept[:, None] if dim % width == 0 else kept[:, None] & (channels < dim)[None]

    def vector(name, number):
        plt.store(pool[name].at[page, slot], number.astype(pool[name].dtype), mask=kept)

    def tokens_of(name):
        for channels in chunks:
            where = given[name].at[row, head, at[:, None], channels[None]]
            x = plt.load(where, mask=there(channels), other=0).astype(jnp.float32)
            if name == "k" and "mean" in given:
                x -= given["mean"][head, channels][None]
            if name == "k" and "balance" in given:
                x /= given["balance"][head, channels][None]
            yield x

    for name, fmt in formats.items():
        parts = list(tokens_of(name))
        if "rotation" in given:
            parts = _rotated(parts, given["rotation"][...], interpret)
        if fmt != "float":
            codes, scale = encode_uniform(parts, fmt, in_kernel=True)
            count = len(parts) // PER_BYTE[fmt]
            parts = [merge(codes[i::count], fmt) for i in range(count)]
            none = jnp.zeros_like(slot)
            where = (page, slot, none) if name == "k" else (page, none, slot)
            plt.store(pool[f"{name}_scale"].at[where], scale.reshape(tile), mask=kept)
        for channels, part in zip(chunks, parts, strict=False):
            where = slot[:, None], channels[None]
            where = pool[name].at[page[:, None], *(where if name == "k" else where[::-1])]
            plt.store(where, part.astype(pool[name].dtype), mask=there(channels))

    position = plt.load(given["pos"].at[row, at], mask=kept, other=0)
    vector("pos", position)
    vector("bias", jnp.zeros(tile, jnp.float32))
    if "mass" in pool:
        mass = jnp.zeros(tile, jnp.float32)
        if "mass" in given:
            mass = plt.load(given["mass"].at[row, head, at], mask=kept, other=0)
        vector("mass", mass)
    if "level" in pool:
        vector("level", jnp.full(tile, UNKNOWN_LEVEL, jnp.uint8))


def _rotated(parts, matrix, interpret):
    """All channels times Hadamard's matrix, chunk by chunk, as exact as float32."""
    step = 1
    while step < len(parts):
        parts = [
            parts[i ^ step] - part if i & step else part + parts[i ^ step]
            for i, part in enumerate(parts)
        ]
        step *= 2
    norm = len(parts) ** -0.5
    return [tile_product(part * norm, matrix, interpret) for part in parts]
