"""The public op: what goes in is checked here, then a backend stores it."""

from typing import Literal

import jax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.layout import KVPages
from pallas_kernels.write_slots.triton import write_slots_triton
from pallas_kernels.write_slots.xla import write_slots_xla

Implementation = Literal["triton", "xla"]


def write_slots(
    pool: KVPages,
    pages: Int[Array, "B Hkv T"],
    slots: Int[Array, "B Hkv T"],
    k: Shaped[Array, "B Hkv T W"],
    v: Shaped[Array, "B Hkv T Wv"],
    pos: Int[Array, "B T"],
    *,
    k_scale: Float[Array, "B Hkv T_k D_k"] | None = None,
    v_scale: Float[Array, "B Hkv T_v D_v"] | None = None,
    k_zero: Float[Array, "B Hkv T_k D_k"] | None = None,
    v_zero: Float[Array, "B Hkv T_v D_v"] | None = None,
    mass: Float[Array, "B Hkv T"] | None = None,
    implementation: Implementation | None = None,
) -> KVPages:
    """Store tokens into given slots, in place where the pool is donated.

    A stored slot gets bias 0 and its position; a slot of the scratch page stays free, so that is
    where padding goes. No other slot may be named twice.

    Args:
        pool: the pages.
        pages: page of each token and KV head.
        slots: slot in that page. Tokens that share a scale come together and in order, in
            neighbouring slots from a multiple of their number on.
        k: keys, rotated to their position: numbers, or the codes that the pool holds.
        v: values, likewise.
        pos: logical positions.
        k_scale: scales of the keys' codes; ``v_scale``, ``k_zero`` and ``v_zero`` likewise. As
            many as the pool has.
        mass: attention that the tokens have received so far, zero if None.
        implementation: a backend by name, which fails loudly where it cannot run; ``None`` takes
            one launch on NVIDIA GPUs where that can run, and XLA's scatters otherwise.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        NotImplementedError: the named backend cannot run this.
    """
    shared = {"k_scale": k_scale, "v_scale": v_scale, "k_zero": k_zero, "v_zero": v_zero}
    _check(pool, pages, slots, k, v, pos, shared)
    if implementation not in (None, "triton", "xla"):
        raise ValueError(f"implementation must be None, 'triton' or 'xla', got {implementation!r}")
    arguments = (pool, pages, slots, k, v, pos)
    if implementation == "triton":
        return write_slots_triton(*arguments)
    if implementation == "xla" or not _one_launch(pool):
        return write_slots_xla(*arguments, **shared, mass=mass)
    return jax.lax.platform_dependent(*arguments, cuda=write_slots_triton, default=write_slots_xla)


def _check(pool, pages, slots, k, v, pos, shared) -> None:
    rows, heads, tokens = pages.shape
    if k.shape[:3] != pages.shape or v.shape[:3] != pages.shape or slots.shape != pages.shape:
        raise ValueError(
            f"k, v, pages and slots must agree, got {k.shape=} {v.shape=} {pages.shape=} "
            f"{slots.shape=}"
        )
    if pos.shape != (rows, tokens) or (pool.k.shape[2], pool.v.shape[1]) != (
        k.shape[3],
        v.shape[3],
    ):
        raise ValueError(
            f"pos must be ({rows}, {tokens}), pool.k (.., .., {k.shape[3]}) and pool.v "
            f"(.., {v.shape[3]}, ..), got {pos.shape=} {pool.k.shape=} {pool.v.shape=}"
        )
    if pool.k.dtype != k.dtype or pool.v.dtype != v.dtype:
        raise ValueError(
            f"dtypes must agree, got {pool.k.dtype=} {k.dtype=} {pool.v.dtype=} {v.dtype=}"
        )
    for name, new in shared.items():
        held = getattr(pool, name)
        if (held is None) != (new is None):
            has = "no" if held is None else "a"
            raise ValueError(f"the pool has {has} {name}, got {'none' if new is None else 'one'}")
        if held is None:
            continue
        many, channels = held.shape[1:] if name.startswith("k") else held.shape[:0:-1]
        wanted = (rows, heads, tokens * many // pool.page_size, channels)
        if new.shape != wanted or new.dtype != held.dtype or tokens * many % pool.page_size:
            raise ValueError(
                f"{name} must be {held.dtype} {wanted}, got {new.dtype} {new.shape} for "
                f"{tokens} tokens"
            )


def _one_launch(pool: KVPages) -> bool:
    """Whether the triton backend takes such a pool; whether it runs is decided when lowering."""
    dim = pool.k.shape[2]
    numbers = pool.k_format == pool.v_format == "float" and pool.mass is None and pool.level is None
    return numbers and dim & (dim - 1) == 0 and not 2**31 <= pool.k.nbytes <= 2**32
