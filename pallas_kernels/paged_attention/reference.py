"""The contract of ``paged_attention`` in float32, written for the eye and not for speed."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import KVPages
from pallas_kernels.read import plain_keys, plain_values


def paged_attention_reference(
    queries: tuple[Float[Array, "B Hq D"], ...],
    pools: tuple[KVPages, ...],
    tables: tuple[Int[Array, "B Hkv _"], ...],
    *,
    scale: float,
    q_pos: Int[Array, " B"] | None = None,
    window: int | None = None,
    sinks: Float[Array, " Hq"] | None = None,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "B Hq D"], Float[Array, "B Hq"], tuple[Float[Array, "B Hkv _"], ...]]:
    """See ``pallas_kernels.paged_attention``; dense over every slot that the tables name.

    Keys and values are read back as the model made them. What is not live is replaced before it is
    used, so it may hold NaN.
    """
    rows, heads, dim = queries[0].shape
    kv_heads = tables[0].shape[1]
    logits, values = [], []
    for q, pages, table in zip(queries, pools, tables, strict=True):
        live = pages.bias[table] > -jnp.inf
        if window is not None:
            live &= q_pos[:, None, None, None] - pages.pos[table] < window
        k = jnp.where(live[..., None], plain_keys(pages, table, jnp.float32), 0)
        v = jnp.where(live[..., None], plain_values(pages, table, jnp.float32), 0)
        flat = (rows, kv_heads, -1)
        grouped = q.astype(jnp.float32).reshape(rows, kv_heads, -1, dim)
        k, bias = k.reshape(*flat, dim), jnp.where(live, pages.bias[table], -jnp.inf).reshape(flat)
        dots = jnp.einsum("bhgd,bhsd->bhgs", grouped, k, precision="highest")
        own = dots * scale
        if soft_cap is not None:
            own = soft_cap * jnp.tanh(own / soft_cap)
        logits.append(own + bias[:, :, None])
        values.append(v.reshape(*flat, dim))
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1)
        logits.append(jnp.broadcast_to(sink, (rows, *sink.shape[1:])))
    widths = [v.shape[2] for v in values]
    whole = jnp.concatenate(logits, -1)
    top = jnp.maximum(whole.max(-1, keepdims=True), -1e30)
    weights = jnp.exp(whole - top)
    total = weights.sum(-1, keepdims=True)
    weights = (weights / jnp.maximum(total, 1e-30))[..., : sum(widths)]
    out = jnp.einsum("bhgs,bhsd->bhgd", weights, jnp.concatenate(values, 2), precision="highest")
    lse = jnp.where(total > 0, top + jnp.log(jnp.maximum(total, 1e-30)), -jnp.inf)
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    mass = tuple(jnp.split(weights.sum(2), ends[:-1], -1))
    return out.reshape(rows, heads, dim), lse.reshape(rows, heads), mass
