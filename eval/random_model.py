"""Models of any shape with random weights, for what takes as long whatever they are."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding

from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.sharding import check_mesh, on, shards, specs

_SIZE = 0.02  # the deviation of weights that language models begin with


def random_model(config: ModelConfig, mesh: Mesh | None = None) -> Decoder:
    """A bfloat16 model on the devices of a mesh, or on JAX's default one, made where it lies.

    Weights are made one by one: a program that makes them all takes a minute to compile.
    """
    check_mesh(config, shards(mesh))
    abstract = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    leaves, kind = jax.tree.flatten(abstract)
    places = [None] * len(leaves)
    if mesh is not None:
        places = [NamedSharding(mesh, spec) for spec in specs(abstract, shards(mesh))]
    keys = jax.random.split(jax.random.key(0), len(leaves))
    with on(mesh):
        made = [
            _maker(leaf.shape, leaf.dtype, place)(key)
            for leaf, place, key in zip(leaves, places, keys, strict=True)
        ]
    return jax.block_until_ready(jax.tree.unflatten(kind, made))


@functools.cache
def _maker(shape: tuple[int, ...], dtype: jnp.dtype, place: Sharding | None):
    def make(key):
        if len(shape) < 2:  # of norms
            return jnp.ones(shape, dtype)
        return jax.random.normal(key, shape, dtype) * jnp.asarray(_SIZE, dtype)

    return jax.jit(make, out_shardings=place)
