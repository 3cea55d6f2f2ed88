"""Projections of a tiny model that are far from the standard basis, and ranks of every kind."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.train.matryoshka.projections import Projections, truncated_states


def shape_of(lm: kvjax.LanguageModel) -> tuple[int, int, int]:
    return lm.config.num_layers, 2, lm.config.num_kv_heads


def drawn(lm: kvjax.LanguageModel) -> tuple[Projections, np.ndarray]:
    """Random orthogonal bases, means, and ranks that all differ from their neighbours'."""
    rng, dim, shape = np.random.default_rng(1), lm.config.head_dim, shape_of(lm)
    u = np.linalg.qr(rng.standard_normal((*shape, dim, dim)))[0]
    mean = rng.standard_normal((*shape, dim))
    ranks = 1 + np.arange(np.prod(shape)).reshape(shape) * 3 % dim
    projections = Projections(*(jnp.asarray(x, jnp.float32) for x in (u, mean)))
    return projections, ranks.astype(np.int32)


@functools.partial(jax.jit)
def logits(model, projections, ranks, ids):
    return model.logits(truncated_states(model, projections, ranks, ids))
