"""K-means over the keys of a segment, many of them at a time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from pallas_kernels.einsum import einsum_float32


def cluster_centers(
    keys: Float[Array, "B H T D"], start: Int[Array, " K"], iterations: int
) -> tuple[Bool[Array, "B H T"], Float32[Array, "B H T"]]:
    """Cluster tokens; returns which is the nearest of its cluster's to the center.

    Lloyd's algorithm with squared distances, in float32. A cluster that loses all its members keeps
    its center. Of tokens equally near the earlier counts.

    Args:
        keys: of the tokens.
        start: indices of the tokens that are the first centers.
        iterations: rounds of assigning tokens and moving centers.

    Returns:
        True at one token of every cluster that has any, and each token's squared distance to the
        center of its cluster.
    """
    x = keys.astype(jnp.float32)
    clusters = len(start)
    if not clusters:
        return jnp.zeros(x.shape[:3], bool), (x**2).sum(-1)

    def assign(centers):
        dots = einsum_float32("bhtd,bhkd->bhtk", x, centers)
        apart = (x**2).sum(-1)[..., None] - 2 * dots + (centers**2).sum(-1)[:, :, None]
        cluster = apart.argmin(-1)
        return cluster, jnp.take_along_axis(apart, cluster[..., None], -1)[..., 0]

    def step(_, centers):
        cluster, _ = assign(centers)
        member = jax.nn.one_hot(cluster, clusters, dtype=jnp.float32)
        count = member.sum(2)[..., None]
        mean = einsum_float32("bhtk,bhtd->bhkd", member, x) / jnp.maximum(count, 1)
        return jnp.where(count > 0, mean, centers)

    centers = jax.lax.fori_loop(0, iterations, step, x[:, :, start])
    cluster, distance = assign(centers)
    number = jnp.arange(clusters, dtype=cluster.dtype)[None, None, None]
    member = cluster[..., None] == number
    nearest = jnp.where(member, distance[..., None], jnp.inf).argmin(2)  # [B, H, K]
    token = jnp.arange(x.shape[2], dtype=nearest.dtype)[None, None, :, None]
    return ((nearest[:, :, None] == token) & member).any(-1), distance
