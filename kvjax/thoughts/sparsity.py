"""How sparse attention is at one step: what ThinKV tells thoughts apart by."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.models.attention import NEG_INF
from pallas_kernels.einsum import einsum_float32

NEGLIGIBLE = 0.01
"""Of a row's largest weight: what lies below it counts as not attended."""

QUERY_BLOCK = 128
"""Queries whose logits exist at the same time."""


def dense_sparsity(
    q: Float[Array, "B T Hq D"],
    k: Float[Array, "B S Hkv D"],
    mask: Bool[Array, "B T S"],
    scale: float,
) -> Float[Array, "B T"]:
    """The share of visible keys that a query hardly attends to, one number a query for all heads.

    As ThinKV has it (arXiv 2510.01290, appendix C.2): logits are max-pooled over the query heads of
    a KV group, the softmax is taken over the visible keys, its weights are averaged over the
    groups, and those below 1 % of the largest are counted. A learned sink (GPT-OSS) is no key and
    takes no part.

    Args:
        q: rotated queries; head ``h`` belongs to KV group ``h // (Hq // Hkv)``.
        k: rotated keys; those that nobody sees may hold anything.
        mask: True where a query sees a key.
        scale: factor on the logits, positive.

    Returns:
        Float32, from 0 to below 1; 0 for a query that sees nothing, NaN if what it sees
        is not finite.
    """
    batch, length, heads, dim = q.shape
    groups = k.shape[2]
    grouped = q.reshape(batch, length, groups, heads // groups, dim)

    def of_query(row: tuple[Array, Array]) -> Float[Array, " B"]:
        query, seen = row
        logits = einsum_float32("bhgd,bshd->bhgs", query, k).max(2) * scale
        weights = jax.nn.softmax(jnp.where(seen[:, None], logits, NEG_INF), -1).mean(1)
        weights = jnp.where(seen, weights, 0.0)
        top = weights.max(-1)
        few = (seen & (weights < NEGLIGIBLE * top[:, None])).sum(-1, dtype=jnp.float32)
        share = few / jnp.maximum(seen.sum(-1, dtype=jnp.float32), 1.0)
        return jnp.where(jnp.isnan(top), jnp.nan, share)

    by_query = (jnp.moveaxis(grouped, 1, 0), jnp.moveaxis(mask, 1, 0))
    return jax.lax.map(of_query, by_query, batch_size=QUERY_BLOCK).T
