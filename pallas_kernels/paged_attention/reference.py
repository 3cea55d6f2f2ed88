"""The contract of ``paged_attention`` in float32, written for the eye and not for speed."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import KVPages


def paged_attention_reference(
    q: Float[Array, "B Hq D"],
    pools: tuple[KVPages, ...],
    tables: tuple[Int[Array, "B Hkv _"], ...],
    *,
    scale: float,
    q_pos: Int[Array, " B"] | None = None,
    window: int | None = None,
    sinks: Float[Array, " Hq"] | None = None,
) -> tuple[Float[Array, "B Hq D"], Float[Array, "B Hq"]]:
    """See ``pallas_kernels.paged_attention``; dense over every slot that the tables name.

    What is not live is replaced before it is used, so it may hold NaN.
    """
    rows, heads, dim = q.shape
    keys, values, biases = [], [], []
    for pages, table in zip(pools, tables, strict=True):
        live = pages.bias[table] > -jnp.inf
        if window is not None:
            live &= q_pos[:, None, None, None] - pages.pos[table] < window
        k = jnp.where(live[..., None], pages.k[table], 0).astype(jnp.float32)
        v = jnp.where(live[..., None], jnp.swapaxes(pages.v[table], -1, -2), 0).astype(jnp.float32)
        flat = (*table.shape[:2], -1)
        keys.append(k.reshape(*flat, dim))
        values.append(v.reshape(*flat, dim))
        biases.append(jnp.where(live, pages.bias[table], -jnp.inf).reshape(flat))
    k, v, bias = (jnp.concatenate(parts, 2) for parts in (keys, values, biases))

    grouped = q.astype(jnp.float32).reshape(rows, k.shape[1], -1, dim)
    logits = jnp.einsum("bhgd,bhsd->bhgs", grouped, k, precision="highest") * scale
    logits = logits + bias[:, :, None]
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, k.shape[1], -1, 1)
        logits = jnp.concatenate([logits, jnp.broadcast_to(sink, (rows, *sink.shape[1:]))], -1)
    top = jnp.maximum(logits.max(-1, keepdims=True), -1e30)
    weights = jnp.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    weights = (weights / jnp.maximum(total, 1e-30))[..., : k.shape[2]]
    out = jnp.einsum("bhgs,bhsd->bhgd", weights, v, precision="highest")
    lse = jnp.where(total > 0, top + jnp.log(jnp.maximum(total, 1e-30)), -jnp.inf)
    return out.reshape(q.shape), lse.reshape(rows, heads)
