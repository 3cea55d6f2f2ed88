"""The public op: what goes in is checked here, then a backend stores it."""

from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import KVPages
from pallas_kernels.write_slots.triton import write_slots_triton
from pallas_kernels.write_slots.xla import write_slots_xla

Implementation = Literal["triton", "xla"]


def write_slots(
    pool: KVPages,
    pages: Int[Array, "B Hkv T"],
    slots: Int[Array, "B Hkv T"],
    k: Float[Array, "B Hkv T D"],
    v: Float[Array, "B Hkv T D"],
    pos: Int[Array, "B T"],
    *,
    implementation: Implementation | None = None,
) -> KVPages:
    """Store tokens into given slots, in place where the pool is donated.

    A stored slot gets bias 0 and its position; a slot of the scratch page stays free, so that is
    where padding goes. No other slot may be named twice.

    Args:
        pool: the pages.
        pages: page of each token and KV head.
        slots: slot in that page.
        k: keys, rotated.
        v: values.
        pos: logical positions.
        implementation: a backend by name, which fails loudly where it cannot run; ``None`` takes
            one launch on NVIDIA GPUs where that can run, and XLA's scatters otherwise.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        NotImplementedError: the named backend cannot run this.
    """
    rows, heads, tokens, dim = k.shape
    if k.shape != v.shape or pages.shape != (rows, heads, tokens) or slots.shape != pages.shape:
        raise ValueError(
            f"k, v, pages and slots must agree, got {k.shape=} {v.shape=} {pages.shape=} "
            f"{slots.shape=}"
        )
    if pos.shape != (rows, tokens) or pool.k.shape[2] != dim:
        raise ValueError(
            f"pos must be ({rows}, {tokens}) and pool.k (.., .., {dim}), "
            f"got {pos.shape=} {pool.k.shape=}"
        )
    if not pool.k.dtype == pool.v.dtype == k.dtype == v.dtype:
        raise ValueError(f"dtypes must agree, got {pool.k.dtype=} {k.dtype=} {v.dtype=}")
    if implementation not in (None, "triton", "xla"):
        raise ValueError(f"implementation must be None, 'triton' or 'xla', got {implementation!r}")
    arguments = (pool, pages, slots, k, v, pos)
    if implementation == "triton":
        return write_slots_triton(*arguments)
    if implementation == "xla" or not _one_launch(pool):
        return write_slots_xla(*arguments)
    return jax.lax.platform_dependent(*arguments, cuda=write_slots_triton, default=write_slots_xla)


def _one_launch(pool: KVPages) -> bool:
    """Whether the triton backend takes such a pool; whether it runs is decided when lowering."""
    dim = pool.k.shape[2]
    return dim & (dim - 1) == 0 and not 2**31 <= pool.k.nbytes <= 2**32
