"""The public op: what goes in is checked here, then a backend computes it."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from pallas_kernels.cluster_centers.triton import cluster_centers_triton, unsupported
from pallas_kernels.cluster_centers.xla import cluster_centers_xla

Implementation = Literal["triton", "xla"]


def cluster_centers(
    keys: Float[Array, "B H T D"],
    start: Int[Array, " K"],
    iterations: int,
    *,
    implementation: Implementation | None = None,
) -> tuple[Bool[Array, "B H T"], Float32[Array, "B H T"]]:
    """Cluster the tokens of every row and head; returns which is nearest to its cluster's center.

    Lloyd's algorithm with squared distances, in float32, but that GPUs round to TF32, which has
    more bits than keys, what they compare. A cluster that loses all its members keeps its center.
    Of centers, and of tokens, that are equally near the earlier counts.

    Args:
        keys: of the tokens.
        start: indices of the tokens that are the first centers.
        iterations: rounds of assigning tokens and moving centers.
        implementation: a backend by name, which fails loudly where it cannot run; ``None`` takes
            the kernel on NVIDIA GPUs where it can run, and XLA otherwise.

    Returns:
        True at one token of every cluster that has any, and each token's squared distance to the
        center of its cluster.

    Raises:
        ValueError: arguments that do not fit together.
        NotImplementedError: the named backend cannot run this.
    """
    if keys.ndim != 4 or not jnp.issubdtype(keys.dtype, jnp.floating):
        raise ValueError(f"keys must be floats [B, H, T, D], got {keys.dtype} {keys.shape}")
    if start.ndim != 1 or not jnp.issubdtype(start.dtype, jnp.integer):
        raise ValueError(f"start must be a list of indices, got {start.dtype} {start.shape}")
    if iterations < 0:
        raise ValueError(f"iterations must be at least 0, got {iterations}")
    if implementation not in (None, "triton", "xla"):
        raise ValueError(f"implementation must be None, 'triton' or 'xla', got {implementation!r}")
    triton, xla = (
        functools.partial(backend, iterations=iterations)
        for backend in (cluster_centers_triton, cluster_centers_xla)
    )
    if implementation == "triton":
        return triton(keys, start)
    if implementation == "xla" or unsupported(keys, start):
        return xla(keys, start)
    return jax.lax.platform_dependent(keys, start, cuda=triton, default=xla)
