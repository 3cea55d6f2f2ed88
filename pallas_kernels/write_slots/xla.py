"""``write_slots`` as four XLA scatters, on any device; also the op's contract."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import SCRATCH_PAGE, KVPages


def write_slots_xla(
    pool: KVPages,
    pages: Int[Array, "B Hkv T"],
    slots: Int[Array, "B Hkv T"],
    k: Float[Array, "B Hkv T D"],
    v: Float[Array, "B Hkv T D"],
    pos: Int[Array, "B T"],
) -> KVPages:
    """See ``pallas_kernels.write_slots``."""
    kept = pages != SCRATCH_PAGE
    # Every index spelled out: XLA then scatters into the transposed values without moving them.
    column = (pages[..., None], jnp.arange(v.shape[-1])[None, None, None], slots[..., None])
    store = {"mode": "promise_in_bounds"}
    return KVPages(
        k=pool.k.at[pages, slots].set(k, **store),
        v=pool.v.at[column].set(v, **store),
        bias=pool.bias.at[pages, slots].set(jnp.where(kept, 0.0, -jnp.inf), **store),
        pos=pool.pos.at[pages, slots].set(jnp.where(kept, pos[:, None], -1), **store),
    )
