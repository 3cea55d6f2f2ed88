"""The public op: what goes in is checked here, then a backend stores it."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.formats import PER_BYTE
from pallas_kernels.layout import KVPages
from pallas_kernels.uniform import FORMATS
from pallas_kernels.write_slots.triton import unsupported, write_slots_triton
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
    """Store tokens into given slots, in place where the pool is donated, and code them if need be.

    A stored slot gets bias 0, its position, and level 255. The scratch page stays free, so that is
    where padding goes, which may hold anything. No other slot may be named twice.

    Args:
        pool: the pages.
        pages: page of each token and KV head.
        slots: slot in that page. Tokens that share a scale come together and in order, in
            neighbouring slots from a multiple of their number on.
        k: keys as the model made them, rotated to their position. Or, where scales are given, what
            the pool holds of them; so it must be where slots share scales.
        v: values, likewise.
        pos: logical positions.
        k_scale: scales of codes that are made already; ``v_scale``, ``k_zero`` and ``v_zero``
            likewise. As many as the pool has, or none at all.
        mass: attention that the tokens have received so far, zero if None.
        implementation: a backend by name, which fails loudly where it cannot run; ``None`` takes
            one launch on NVIDIA GPUs where that can run, and XLA's scatters otherwise.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        NotImplementedError: the named backend cannot run this.
    """
    shared = {"k_scale": k_scale, "v_scale": v_scale, "k_zero": k_zero, "v_zero": v_zero}
    coded = any(part is not None for part in shared.values())
    if coded or pool.plain:
        _check_held(pool, pages, k, v, shared)
    else:
        _check_uncoded(pool, k, v)
    _check(pages, slots, k, v, pos)
    if implementation not in (None, "triton", "xla"):
        raise ValueError(f"implementation must be None, 'triton' or 'xla', got {implementation!r}")
    arguments = (pool, pages, slots, k, v, pos, mass)
    reason = "no codes that are made already" if coded else unsupported(pool, k, v)
    if implementation == "triton":
        if reason:
            raise NotImplementedError(f"triton write_slots: {reason}")
        return write_slots_triton(*arguments)
    if implementation == "xla" or reason:
        return write_slots_xla(*arguments, **shared)
    return jax.lax.platform_dependent(*arguments, cuda=write_slots_triton, default=write_slots_xla)


def _check(pages, slots, k, v, pos) -> None:
    if k.shape[:3] != pages.shape or v.shape[:3] != pages.shape or slots.shape != pages.shape:
        raise ValueError(
            f"k, v, pages and slots must agree, got {k.shape=} {v.shape=} {pages.shape=} "
            f"{slots.shape=}"
        )
    if pos.shape != (pages.shape[0], pages.shape[2]):
        raise ValueError(f"pos must be ({pages.shape[0]}, {pages.shape[2]}), got {pos.shape=}")


def _check_uncoded(pool, k, v) -> None:
    """Keys and values that are still to be coded."""
    formats = pool.k_format, pool.v_format
    if not pool.uniform or not {*formats} <= {"float", *FORMATS}:
        raise ValueError(f"slots of {formats} share scales or have a zero point: give their codes")
    held = tuple(
        width * PER_BYTE.get(fmt, 1)
        for width, fmt in zip((pool.k.shape[2], pool.v.shape[1]), formats, strict=True)
    )
    if held != (k.shape[-1], v.shape[-1]):
        raise ValueError(f"the pool holds {held} channels, got {k.shape=} {v.shape=}")
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (k, v)):
        raise ValueError(f"numbers to code must be floats, got {k.dtype=} {v.dtype=}")


def _check_held(pool, pages, k, v, shared) -> None:
    """Numbers or codes as the pool holds them."""
    rows, heads, tokens = pages.shape
    if (pool.k.shape[2], pool.v.shape[1]) != (k.shape[3], v.shape[3]):
        raise ValueError(
            f"pool.k must be (.., .., {k.shape[3]}) and pool.v (.., {v.shape[3]}, ..), got "
            f"{pool.k.shape=} {pool.v.shape=}"
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
