"""Decoding with DynaKV's latents on a GPU: pools and bases stay where they are."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kvjax.decoding import decode_chunk
from kvjax.dynakv.projector import Projector
from kvjax.dynakv.settings import SpectralSettings
from kvjax.models.decoder import Decoder
from kvjax.recipes import Recipe
from tests.aot.checks import gathered
from tests.aot.test_recipes import CONFIG, copied, state_of

pytestmark = pytest.mark.aot
PROJECTOR = Projector("folder", "", "small", "", SpectralSettings(), rates=((0.4, 0.4),))
RECIPE = Recipe("dynakv", projector=PROJECTOR, page_size=16)


@pytest.mark.parametrize("codec", ["bf16", "int4"])
def test_decode_chunk(h200, codec):
    """Two launches for all pools of a layer; nothing of a cache's size is copied or gathered."""
    recipe = dataclasses.replace(RECIPE, codec=codec)
    state = state_of(recipe)
    model = nnx.eval_shape(lambda: Decoder(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    program = h200.compile(
        decode_chunk, model, state, None, state.finite, steps=16, stop_ids=(1,), recipe=recipe
    )
    layers = state.cache.layers
    kept = [(layer.pools, layer.coder) for layer in layers]
    assert copied(program, kept) == []
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.cache))
    assert program.aliased >= held
    assert program.module.waits() == []
    pools = [pool for layer in layers for pool in layer.pools]
    assert gathered(program, frozenset(pool.k.size for pool in pools)) == []
    names = [launch.name for launch in program.launches]
    for name in ("latent_logits", "latent_values"):
        assert sum(launched.startswith(name) for launched in names) == len(layers)
    first, second = (at for at, name in enumerate(names) if name.startswith("latent_logits"))
    assert second - first <= 22, names[first:second]  # of a layer
