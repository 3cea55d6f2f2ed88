"""Attention over keys and values held in full, as a sequence is read.

Every function here returns the normalised output together with its log-sum-exp, so that parts of
one softmax (a history in pages, the tokens just read, a learned sink) can be computed apart and
merged exactly.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.einsum import einsum_float32

NEG_INF = -1e30  # finite, so that a row with nothing to attend gives zeros and never NaN


QUERY_BLOCK = 512
"""Queries attended at once outside pages: bounds the memory of the scores."""


def biased_attention(
    q: Float[Array, "B T Hq D"],
    k: Float[Array, "B Hkv S D"],
    v: Float[Array, "B Hkv S D"],
    bias: Float[Array, "#B #Hkv #T S "],
    scale: float,
) -> tuple[Float[Array, "B T Hq D"], Float[Array, "B T Hq"]]:
    """Softmax attention with logits ``q . k * scale + bias``, accumulated in float32.

    A bias of ``-inf`` hides a key, whose key and value must still be finite. Query head ``h`` reads
    KV head ``h // (Hq // Hkv)``; the KV heads are never repeated.

    Returns:
        The float32 output (zero where a query sees nothing) and the float32 log-sum-exp
        (``NEG_INF`` there).
    """
    batch, length, heads, dim = q.shape
    grouped = q.reshape(batch, length, k.shape[1], heads // k.shape[1], dim)
    dots = einsum_float32("bthgd,bhsd->bhgts", grouped, k)
    bias = bias[:, :, None]
    seen = bias > NEG_INF
    scores = jnp.where(seen, dots * scale + bias, NEG_INF)
    top = scores.max(-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    total = weights.sum(-1, keepdims=True)
    weights = (weights / jnp.maximum(total, 1e-30)).astype(v.dtype)
    out = einsum_float32("bhgts,bhsd->bthgd", weights, v)
    lse = jnp.where(total > 0, top + jnp.log(jnp.maximum(total, 1e-30)), NEG_INF)[..., 0]
    return out.reshape(q.shape), jnp.moveaxis(lse, 3, 1).reshape(batch, length, heads)


def masked_attention(
    q: Float[Array, "B T Hq D"],
    k: Float[Array, "B S Hkv D"],
    v: Float[Array, "B S Hkv D"],
    mask: Bool[Array, "B T S"],
    scale: float,
) -> tuple[Float[Array, "B T Hq D"], Float[Array, "B T Hq"]]:
    """``biased_attention`` over the keys of a sequence, where ``mask`` is true."""
    bias = jnp.where(mask, 0.0, -jnp.inf)[:, None]
    return biased_attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), bias, scale)


def causal_attention(
    q: Float[Array, "B T Hq D"],
    k: Float[Array, "B T Hkv D"],
    v: Float[Array, "B T Hkv D"],
    positions: Int[Array, "B T"],
    scale: float,
    window: int | None,
) -> tuple[Float[Array, "B T Hq D"], Float[Array, "B T Hq"]]:
    """Attention of rows to themselves, a block of queries at a time; see ``biased_attention``.

    Padding lies to the right, in the future of every token, so it needs no mask of its own.
    """
    parts = []
    for start in range(0, q.shape[1], QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, q.shape[1])
        mask = causal_mask(positions[:, start:end], positions[:, :end], window)
        parts.append(masked_attention(q[:, start:end], k[:, :end], v[:, :end], mask, scale))
    out, lse = zip(*parts, strict=True)
    return jnp.concatenate(out, 1), jnp.concatenate(lse, 1)


def causal_mask(
    query_pos: Int[Array, "B T"], key_pos: Int[Array, "B S"], window: int | None
) -> Bool[Array, "B T S"]:
    """True where a query may see a key: not in its future, and within ``window`` tokens of it.

    A key position of -1 marks a key that nobody sees.
    """
    distance = query_pos[:, :, None] - key_pos[:, None, :]
    mask = (distance >= 0) & (key_pos >= 0)[:, None, :]
    return mask if window is None else mask & (distance < window)


def merge(
    out_a: Float[Array, "B T Hq D"],
    lse_a: Float[Array, "B T Hq"],
    out_b: Float[Array, "B T Hq D"],
    lse_b: Float[Array, "B T Hq"],
) -> tuple[Float[Array, "B T Hq D"], Float[Array, "B T Hq"]]:
    """One softmax out of two parts over disjoint keys."""
    lse = jnp.logaddexp(lse_a, lse_b)
    weight_a = jnp.exp(lse_a - lse)[..., None]
    weight_b = jnp.exp(lse_b - lse)[..., None]
    return out_a * weight_a + out_b * weight_b, lse


def add_sinks(
    out: Float[Array, "B T Hq D"], lse: Float[Array, "B T Hq"], sinks: Float[Array, " Hq"] | None
) -> Float[Array, "B T Hq D"]:
    """Give each head's learned sink (GPT-OSS) its share of the softmax; a sink has no value."""
    if sinks is None:
        return out
    return out * jax.nn.sigmoid(lse - sinks.astype(jnp.float32)[None, None])[..., None]


def lse_with_sinks(
    lse: Float[Array, "B T Hq"], sinks: Float[Array, " Hq"] | None
) -> Float[Array, "B T Hq"]:
    """The log-sum-exp of a softmax in which each head's learned sink takes part."""
    if sinks is None:
        return lse
    return jnp.logaddexp(lse, sinks.astype(jnp.float32)[None, None])
