"""``write_slots`` as one Pallas-Triton launch: a program a token and KV head."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import SCRATCH_PAGE, KVPages


def write_slots_triton(
    pool: KVPages,
    pages: Int[Array, "B Hkv T"],
    slots: Int[Array, "B Hkv T"],
    k: Float[Array, "B Hkv T D"],
    v: Float[Array, "B Hkv T D"],
    pos: Int[Array, "B T"],
    *,
    interpret: bool = False,
) -> KVPages:
    """See ``pallas_kernels.write_slots``.

    Raises:
        NotImplementedError: a head size that is no power of two, a pool of codes or with attention
            mass, or one whose offsets would overflow the kernel's 32-bit index arithmetic.
    """
    dim = k.shape[-1]
    if dim & (dim - 1):
        raise NotImplementedError(f"triton needs a head_dim that is a power of two, got {dim}")
    if pool.k_format != "float" or pool.v_format != "float" or pool.mass is not None:
        raise NotImplementedError("triton write_slots: a pool of codes, or with attention mass")
    if 2**31 <= pool.k.nbytes <= 2**32:
        raise NotImplementedError(
            f"triton cannot address pools of 2 to 4 GiB, got {pool.k.nbytes} bytes"
        )
    arrays = (pool.k, pool.v, pool.bias, pool.pos)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    stored = pl.pallas_call(
        _store,
        grid=pages.shape,
        in_specs=[whole] * 9,
        out_specs=[whole] * 4,
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
        input_output_aliases={5 + i: i for i in range(4)},  # what is not stored to survives
        compiler_params=plt.CompilerParams(num_warps=1),
        interpret=interpret,
        name="write_slots",
    )(pages, slots, k, v, pos, *arrays)
    return dataclasses.replace(pool, **dict(zip(("k", "v", "bias", "pos"), stored, strict=True)))


def _store(pages, slots, k, v, pos, *pools):
    row, head, token = (pl.program_id(axis) for axis in range(3))
    out_k, out_v, out_bias, out_pos = pools[4:]
    page, slot = pages[row, head, token], slots[row, head, token]
    kept = page != SCRATCH_PAGE
    out_k[page, slot, :] = k[row, head, token, :]
    out_v[page, :, slot] = v[row, head, token, :]
    out_bias[page, slot] = jnp.where(kept, jnp.float32(0), jnp.float32(-jnp.inf))
    out_pos[page, slot] = jnp.where(kept, pos[row, token], jnp.int32(-1))
