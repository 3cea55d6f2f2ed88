"""``write_slots`` as XLA scatters, on any device; also the op's contract."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.formats import pack
from pallas_kernels.layout import SCRATCH_PAGE, UNKNOWN_LEVEL, KVPages
from pallas_kernels.rotation import into_basis
from pallas_kernels.uniform import encode_uniform

_STORE = {"mode": "promise_in_bounds"}


def write_slots_xla(
    pool: KVPages,
    pages: Int[Array, "B Hkv T"],
    slots: Int[Array, "B Hkv T"],
    k: Shaped[Array, "B Hkv T W"],
    v: Shaped[Array, "B Hkv T Wv"],
    pos: Int[Array, "B T"],
    mass: Float[Array, "B Hkv T"] | None = None,
    **shared: Float[Array, "B Hkv _ _"] | None,
) -> KVPages:
    """See ``pallas_kernels.write_slots``."""
    kept = pages != SCRATCH_PAGE
    # Zeros to the scratch page, which every row's table is padded with: a NaN of one row must not
    # meet another row's attention weight of zero.
    k, v = (jnp.where(kept[..., None], x, jnp.zeros((), x.dtype)) for x in (k, v))
    if not pool.plain and all(part is None for part in shared.values()):
        k, shared["k_scale"] = _coded(
            into_basis(k, pool.mean, pool.balance, pool.rotated), pool, "k"
        )
        v, shared["v_scale"] = _coded(into_basis(v, None, None, pool.rotated), pool, "v")
    stored = {
        "k": _store_rows(pool.k, pages, slots, k),
        "v": _store_columns(pool.v, pages, slots, v),
        "pos": pool.pos.at[pages, slots].set(jnp.where(kept, pos[:, None], -1), **_STORE),
    }
    if pool.bias is not None:
        bias = jnp.where(kept, 0.0, -jnp.inf)
        stored["bias"] = pool.bias.at[pages, slots].set(bias, **_STORE)
    if pool.mass is not None:
        stored["mass"] = pool.mass.at[pages, slots].set(0.0 if mass is None else mass, **_STORE)
    if pool.level is not None:
        stored["level"] = pool.level.at[pages, slots].set(jnp.uint8(UNKNOWN_LEVEL), **_STORE)
    for name, new in shared.items():
        if new is not None:
            store = _store_rows if name.startswith("k") else _store_columns
            tokens = pages.shape[2] // new.shape[2]  # that share an entry, in neighbouring slots
            where = pages[:, :, ::tokens], slots[:, :, ::tokens] // tokens
            stored[name] = store(getattr(pool, name), *where, new)
    return dataclasses.replace(pool, **stored)


def _coded(x, pool, side):
    """What the pool holds of ``x``, keys or values in its basis: numbers or codes, and scales."""
    fmt = getattr(pool, f"{side}_format")
    if fmt == "float":
        return x.astype(getattr(pool, side).dtype), None
    (codes,), scale = encode_uniform([x], fmt)
    return pack(codes, fmt, -1), scale


def _store_rows(array, pages, slots, new) -> Array:
    return array.at[pages, slots].set(new, **_STORE)


def _store_columns(array, pages, slots, new) -> Array:
    # Every index spelled out: XLA then scatters into the transposed values without moving them.
    channels = jnp.arange(new.shape[-1])[None, None, None]
    return array.at[pages[..., None], channels, slots[..., None]].set(new, **_STORE)
