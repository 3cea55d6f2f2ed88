"""Modules whose every parameter is random: norms, biases and sinks as well."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def randomised(build: Callable[[], nnx.Module], spread: float) -> nnx.Module:
    """What ``build`` gives, with parameters drawn by NumPy, which has nothing to compile."""
    graph, state = nnx.split(nnx.eval_shape(build))
    rng = np.random.default_rng(0)

    def draw(leaf):
        return jnp.asarray(spread * rng.standard_normal(leaf.shape), leaf.dtype)

    return nnx.merge(graph, jax.tree.map(draw, state))
