"""``paged_attention`` in plain XLA: gathers the pages that the tables name, on any device."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.einsum import einsum_float32
from pallas_kernels.layout import KVPages
from pallas_kernels.read import coded_values, plain_output, slot_products

NEG_INF = -1e30  # finite, so that a row with no live slot gives zeros and never NaN


def paged_attention_xla(
    queries: tuple[Float[Array, "B Hq D"], ...],
    pools: tuple[KVPages, ...],
    tables: tuple[Int[Array, "B Hkv _"], ...],
    *,
    scale: float,
    q_pos: Int[Array, " B"] | None,
    window: int | None,
    sinks: Float[Array, " Hq"] | None,
    soft_cap: float | None = None,
    with_mass: bool = False,
) -> tuple[Any, ...]:
    """See ``pallas_kernels.paged_attention``. Free slots of a named page must be finite."""
    rows, heads = tables[0].shape[:2]
    grouped = (rows, heads, -1, queries[0].shape[2])

    logits, live = [], []
    for q, pages, table in zip(queries, pools, tables, strict=True):
        own = slot_products(pages, table, q) * scale
        if soft_cap is not None:
            own = soft_cap * jnp.tanh(own / soft_cap)
        bias = pages.bias[table]
        if window is not None:
            near = q_pos[:, None, None, None] - pages.pos[table] < window
            bias = jnp.where(near, bias, -jnp.inf)
        bias = bias.reshape(rows, heads, 1, -1)
        live.append(bias > NEG_INF)
        logits.append(jnp.where(live[-1], own + bias, NEG_INF))
    weights, lse = _softmax(logits, live, sinks)

    out = jnp.zeros(queries[0].reshape(grouped).shape, jnp.float32)
    for pages, table, part in zip(pools, tables, weights, strict=True):
        v = coded_values(pages, table, queries[0].dtype)
        part = part.astype(v.dtype).reshape(*part.shape[:3], table.shape[2], -1)
        # Page by page and then summed: one product over all slots would first move every value.
        out += plain_output(pages, einsum_float32("bhgpt,bhpdt->bhpgd", part, v).sum(2))
    found = out.reshape(queries[0].shape), lse.reshape(queries[0].shape[:2])
    return (*found, tuple(part.sum(2) for part in weights)) if with_mass else found


def _softmax(logits: list[Array], live: list[Array], sinks: Float[Array, " Hq"] | None):
    """One softmax over all parts: the weights of each part, and the log-sum-exp."""
    widths = [part.shape[-1] for part in logits]
    parts = list(logits)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, *logits[0].shape[1:3], 1)
        parts.append(jnp.broadcast_to(sink, (*logits[0].shape[:3], 1)))
    whole = jnp.concatenate(parts, -1)
    weights = jax.nn.softmax(whole, -1)
    lse = jax.nn.logsumexp(whole, -1)
    starts = [sum(widths[:i]) for i in range(len(widths))]
    # Where nothing is live, the softmax is spread over all slots: it must be none.
    masked = [
        jnp.where(seen, weights[..., start : start + width], 0.0)
        for seen, start, width in zip(live, starts, widths, strict=True)
    ]
    return masked, jnp.where(lse > NEG_INF / 2, lse, -jnp.inf)
