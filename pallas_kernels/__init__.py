"""Kernels for a paged key-value cache, usable on their own: they need only jax and jaxtyping.

Each op is a folder: ``api.py`` checks and dispatches, ``reference.py`` is the float32 contract, and
every backend has a file of its own.
"""

from pallas_kernels.cluster_centers.api import cluster_centers
from pallas_kernels.latent_attention.api import latent_attention
from pallas_kernels.layout import SCRATCH_PAGE, KVPages
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.write_slots.api import write_slots

__all__ = [
    "SCRATCH_PAGE",
    "KVPages",
    "cluster_centers",
    "latent_attention",
    "paged_attention",
    "write_slots",
]
