"""DynaKV's update compiled for an H200: what its products with the vocabulary are made of.

The check is shown to fail where the gradient is left to JAX.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kvjax.dynakv.settings import SpectralSettings
from kvjax.dynakv.spectrum import blank
from kvjax.eval.bench_scale import SMOLLM2
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.train.dynakv import loss, state
from kvjax.train.dynakv.settings import TrainSettings
from tests.aot import hlo

pytestmark = pytest.mark.aot

SHAPE = {**SMOLLM2, "num_hidden_layers": 2}
SETTINGS = TrainSettings(seq_len=512, batch_size=4, grad_accum=1, remat=False)


def compiled(h200) -> hlo.Module:
    config, spectral = ModelConfig.from_hf(SHAPE), SpectralSettings()

    def make():
        model = Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        return loss.Trained(model, blank(config, spectral))

    trains = functools.partial(state._is_trained, SETTINGS.trains)
    graph, parameters, kept = nnx.split(nnx.eval_shape(make), trains, ...)
    moments = jax.eval_shape(state.optimiser(SETTINGS).init, parameters)
    shape = 1, SETTINGS.batch_size, SETTINGS.seq_len
    tokens, valid = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.bool_))
    alpha = jax.ShapeDtypeStruct((), jnp.float32)
    given = graph, parameters, moments, kept, tokens, valid, alpha
    return h200.compile(state._update, *given, settings=SETTINGS).module


def products(module: hlo.Module) -> list[tuple[str, ...]]:
    """Of every product with the vocabulary's matrix, the types of its operands."""
    found, entries = [], SHAPE["vocab_size"] * SHAPE["hidden_size"]
    for computation in module.computations.values():
        for one in computation.values():
            if one.opcode == "dot" or "cublas" in one.attributes:
                given = [computation[name] for name in one.operands if name in computation]
                if (entries,) in [operand.sizes for operand in given]:
                    found.append(tuple(operand.type.split("[")[0] for operand in given[:2]))
    return found


def test_products_with_the_vocabulary_are_of_the_weights_type(h200, monkeypatch):
    """Of logits, and of their slopes; none for the head, which is frozen."""
    assert products(compiled(h200)) == [("bf16", "bf16")] * 2
    monkeypatch.setattr(loss, "_nats", lambda *args: loss._nats_and_slope(*args)[0])
    jax.clear_caches()
    assert ("f32", "f32") in products(compiled(h200))
