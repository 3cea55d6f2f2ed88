"""``paged_attention`` in plain XLA: gathers the pages that the tables name, on any device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import KVPages

NEG_INF = -1e30  # finite, so that a row with no live slot gives zeros and never NaN


def paged_attention_xla(
    q: Float[Array, "B Hq D"],
    pools: tuple[KVPages, ...],
    tables: tuple[Int[Array, "B Hkv P"], ...],
    *,
    scale: float,
    q_pos: Int[Array, " B"] | None,
    window: int | None,
    sinks: Float[Array, " Hq"] | None,
) -> tuple[Float[Array, "B Hq D"], Float[Array, "B Hq"]]:
    """See ``pallas_kernels.paged_attention``. Free slots of a named page must be finite."""
    grouped = q.reshape(q.shape[0], tables[0].shape[1], -1, q.shape[2])
    # Float32 means float32, also where a GPU would round products to TF32.
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    exact = {"precision": precision, "preferred_element_type": jnp.float32}
    logits, live = [], []
    for pages, table in zip(pools, tables, strict=True):
        bias = pages.bias[table]
        seen = bias > NEG_INF
        if window is not None:
            seen &= q_pos[:, None, None, None] - pages.pos[table] < window
        dots = jnp.einsum("bhgd,bhptd->bhgpt", grouped, pages.k[table], **exact)
        seen = seen[:, :, None]
        logits.append(jnp.where(seen, dots * scale + bias[:, :, None], NEG_INF))
        live.append(seen)

    top = jnp.stack([part.max((-2, -1)) for part in logits]).max(0)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, *top.shape[1:])
        top = jnp.maximum(top, sink)
    total = jnp.zeros_like(top) if sinks is None else jnp.exp(sink - top)
    out = jnp.zeros(grouped.shape, jnp.float32)
    for pages, table, part, seen in zip(pools, tables, logits, live, strict=True):
        weights = jnp.where(seen, jnp.exp(part - top[..., None, None]), 0.0)
        total += weights.sum((-2, -1))
        weights = weights.astype(pages.v.dtype)
        out += jnp.einsum("bhgpt,bhpdt->bhgd", weights, pages.v[table], **exact)
    total = jnp.maximum(total, 1e-30)
    lse = jnp.where(total > 1e-30, top + jnp.log(total), -jnp.inf)
    return (out / total[..., None]).reshape(q.shape), lse.reshape(q.shape[:2])
