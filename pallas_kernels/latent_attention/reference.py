"""The contract of ``latent_attention`` in float32, written for the eye and not for speed."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.latent_attention.layout import Basis, Rotary
from pallas_kernels.layout import KVPages
from pallas_kernels.read import plain_keys


def latent_attention_reference(
    q: Float[Array, "B Hq D"],
    pools: tuple[KVPages, ...],
    tables: tuple[Int[Array, "B _ _"], ...],
    keys: Basis,
    values: Basis,
    rotary: Rotary,
    *,
    scale: float,
    span: int,
    q_pos: Int[Array, " B"] | None = None,
    window: int | None = None,
    sinks: Float[Array, " Hq"] | None = None,
) -> tuple[Float[Array, "B Hq D"], Float[Array, "B Hq"]]:
    """See ``pallas_kernels.latent_attention``; every key and value is rebuilt in whole."""
    rows, heads, dim = q.shape
    width = len(keys.back)
    latents = jnp.zeros((2, rows, span, width), jnp.float32)
    live = jnp.zeros((rows, span), bool)
    for pool, table in zip(pools, tables, strict=True):
        dense, there = _dense(pool, table, span, width)
        latents += dense
        live |= there
    kv_heads = keys.back.shape[1] // dim
    k, v = (
        basis.rebuild(latent).reshape(rows, span, kv_heads, dim)
        for latent, basis in zip(latents, (keys, values), strict=True)
    )
    angles = jnp.arange(span, dtype=jnp.float32)[:, None] * rotary.frequencies[None]
    cos, sin = (turn(angles)[None, :, None] * rotary.factor for turn in (jnp.cos, jnp.sin))
    first, second = jnp.split(k, 2, -1)
    k = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    if window is not None:
        live &= q_pos[:, None] - jnp.arange(span, dtype=jnp.int32)[None] < window
    grouped = q.astype(jnp.float32).reshape(rows, kv_heads, -1, dim)
    logits = jnp.einsum("bhgd,bshd->bhgs", grouped, k, precision="highest") * scale
    logits = jnp.where(live[:, None, None], logits, -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1)
        sink = jnp.broadcast_to(sink, (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, sink], -1)
    lse = jax.nn.logsumexp(logits, -1)
    weights = jnp.exp(logits - jnp.maximum(lse, -1e30)[..., None])[..., :span]
    out = jnp.einsum("bhgs,bshd->bhgd", weights, v, precision="highest")
    return out.reshape(q.shape), lse.reshape(rows, heads)


def _dense(pool: KVPages, table: Array, span: int, width: int) -> tuple[Array, Array]:
    """Latents of keys (0) and values (1) at their positions, and where a token is."""
    rows, lines, _ = table.shape
    pos = pool.pos[table].reshape(rows, lines, -1)
    parts = plain_keys(pool, table, jnp.float32).reshape(*pos.shape, -1)
    parts = jnp.where((pos >= 0)[..., None], parts, 0)
    row, line = (jnp.arange(n, dtype=jnp.int32) for n in (rows, lines))
    at = row[:, None, None], line[None, :, None], jnp.where(pos < 0, span, pos)
    dense = jnp.zeros((rows, lines, span, parts.shape[-1]), jnp.float32)
    dense = dense.at[at].set(parts, mode="drop").reshape(rows, lines // 2, 2, span, -1)
    there = jnp.zeros((rows, lines, span), bool).at[at].set(True, mode="drop")
    return jnp.moveaxis(dense, 1, 3).swapaxes(0, 1).reshape(2, rows, span, width), there[:, 0]
