"""``cluster_centers`` in XLA, on any device; also the op's contract."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

EQUAL = 1.0001
"""Squared distances up to this factor apart count as equal: two tokens that are a cluster of their
own are equally far from its center, and rounding must not choose between them."""
NOTHING = 1e-10
"""Squared distances up to this share of a key's squared norm are rounding, and count as none."""
_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGH)


def cluster_centers_xla(
    keys: Float[Array, "B H T D"], start: Int[Array, " K"], iterations: int
) -> tuple[Bool[Array, "B H T"], Float32[Array, "B H T"]]:
    """See ``pallas_kernels.cluster_centers``; GPUs round what they multiply to TF32."""
    x = keys.astype(jnp.float32)
    clusters = len(start)
    if not clusters:
        return jnp.zeros(x.shape[:3], bool), (x**2).sum(-1)
    x -= x[:, :, :1]  # what all have in common says nothing, and costs digits

    def assign(centers):
        dots = _product("bhtd,bhkd->bhtk", x, centers)
        return ((centers**2).sum(-1)[:, :, None] - 2 * dots).argmin(-1)

    def step(_, centers):
        member = jax.nn.one_hot(assign(centers), clusters, dtype=jnp.float32)
        count = member.sum(2)[..., None]
        mean = _product("bhtk,bhtd->bhkd", member, x) / jnp.maximum(count, 1)
        return jnp.where(count > 0, mean, centers)

    centers = jax.lax.fori_loop(0, iterations, step, x[:, :, start])
    cluster = assign(centers)
    apart = ((x - jnp.take_along_axis(centers, cluster[..., None], 2)) ** 2).sum(-1)
    apart = jnp.where(apart > NOTHING * (x**2).sum(-1), apart, 0)
    member = cluster[..., None] == jnp.arange(clusters, dtype=cluster.dtype)[None, None, None]
    least = jnp.where(member, apart[..., None], jnp.inf).min(2, keepdims=True)
    near = member & (apart[..., None] <= EQUAL * least)
    first = near & (jnp.cumsum(near, 2, dtype=jnp.int32) == 1)
    return first.any(-1), apart
