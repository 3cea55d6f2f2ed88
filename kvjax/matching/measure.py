"""How far the fitted cache is from the one it stands for."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.compress.context import Context
from kvjax.matching.least_squares import product
from kvjax.matching.matching import Fitted
from kvjax.matching.scores import Head, each_head


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MatchErrors:
    """Of every KV head, over the queries that see any token; 0 if none does.

    Attributes:
        log_mass: mean of ``log(mass of the fitted slots / mass of all slots)``; below 0, the
            fitted slots lose against tokens that are read later.
        mass: mean of ``|mass of the fitted slots / mass of all slots - 1|``.
        output: ``|difference of the outputs| / |outputs|``, root sums of squares.
    """

    log_mass: Float[Array, "B Hkv"]
    mass: Float[Array, "B Hkv"]
    output: Float[Array, "B Hkv"]


def match_errors(
    ctx: Context, fitted: Fitted, stored_k: Float[Array, "B Hkv S D"] | None = None
) -> MatchErrors:
    """Compare attention over the fitted slots with attention over all of ``ctx``.

    Args:
        ctx: the cache that was matched, with keys and values. With the queries that were fitted
            this gives the training error, with other queries in their place the held-out error.
            The two are far apart where there are few queries.
        fitted: what became of the cache.
        stored_k: the kept keys as the cache holds them, as for the matching.
    """
    k = ctx.k if stored_k is None else stored_k
    k = jnp.take_along_axis(k, fitted.index[..., None], 2)
    arrays = ctx.v, k, fitted.index, fitted.valid, fitted.bias, fitted.v
    return MatchErrors(*each_head(_errors, ctx, ctx.queries.shape[1], *arrays))


def _errors(head: Head, v, k, index, valid, bias, fitted_v):
    v = jnp.where(head.live[:, None], v, 0).astype(jnp.float32)
    k = jnp.where(valid[:, None], k, 0).astype(jnp.float32)
    seen = head.seen
    logits = head.logits(head.k, head.bias, seen)
    kept_seen = seen[:, index] & valid[None]
    kept = head.logits(k, jnp.where(valid, bias, 0), kept_seen)
    mass, kept_mass = (jax.nn.logsumexp(x, axis=1) for x in (logits, kept))
    share = jnp.exp(jnp.where(seen, logits, -jnp.inf) - mass[:, None])
    outputs = product(share, v)
    kept_share = jnp.exp(jnp.where(kept_seen, kept, -jnp.inf) - kept_mass[:, None])
    difference = product(kept_share, fitted_v) - outputs
    asked = seen.any(1)
    count = jnp.maximum(asked.sum(dtype=jnp.int32), 1).astype(jnp.float32)
    ratio = jnp.where(asked, kept_mass - mass, 0)
    norm, apart = ((jnp.where(asked[:, None], x, 0) ** 2).sum() for x in (outputs, difference))
    return (
        ratio.sum() / count,
        jnp.abs(jnp.expm1(ratio)).sum() / count,
        jnp.sqrt(apart / jnp.maximum(norm, 1e-30)),
    )
