"""DynaKV's update compiled for an H200: what its products are made of.

The checks are shown to fail where the gradient is left to JAX, and for a model in float32.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kvjax.dynakv import product
from kvjax.dynakv.settings import SpectralSettings
from kvjax.dynakv.spectrum import blank
from kvjax.eval.bench_training import SMOLLM2
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.train.dynakv import loss, state
from kvjax.train.dynakv.settings import TrainSettings
from tests.aot import hlo

pytestmark = pytest.mark.aot

SHAPE = {**SMOLLM2, "num_hidden_layers": 2}
SETTINGS = TrainSettings(seq_len=512, batch_size=4, grad_accum=1, remat=False)


def compiled(h200, dtype=jnp.bfloat16) -> hlo.Module:
    config, spectral = ModelConfig.from_hf(SHAPE), SpectralSettings()

    def make():
        model = Decoder(config, dtype=dtype, rngs=nnx.Rngs(0))
        return loss.Trained(model, blank(config, spectral))

    trains = functools.partial(state._is_trained, SETTINGS.trains)
    graph, parameters, kept = nnx.split(nnx.eval_shape(make), trains, ...)
    moments = jax.eval_shape(state.optimiser(SETTINGS).init, parameters)
    shape = 1, SETTINGS.batch_size, SETTINGS.seq_len
    tokens, valid = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.bool_))
    number = jax.ShapeDtypeStruct((), jnp.float32)
    given = graph, parameters, moments, kept, tokens, valid, number, number
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


def beside(module: hlo.Module) -> list[hlo.Instruction]:
    """Products of float32 in the loops over layers."""
    return [
        one
        for one, operands in module.looped()
        if (one.opcode == "dot" or "cublas" in one.attributes)
        and [operand.type.split("[")[0] for operand in operands[:2]] == ["f32"] * 2
    ]


def of_type(products: list[hlo.Instruction], *sizes: int) -> list[hlo.Instruction]:
    start = f"f32[{','.join(map(str, sizes))}]"
    return [one for one in products if one.type.lstrip("(").startswith(start)]


def at_most_precision(products: list[hlo.Instruction]) -> list[hlo.Instruction]:
    return [one for one in products if "HIGHEST" in one.attributes.upper()]


def test_products_beside_a_model_in_bfloat16_are_tf32_and_fill_a_gpu(h200):
    """Sums over tokens are cut; without the barrier between they would be put together again."""
    found, width = beside(compiled(h200)), 3 * 64
    assert not at_most_precision(found)
    assert (
        len(of_type(found, product._PARTS, width, width)) == 6
    )  # of U, W and the inverse, K and V
    assert not of_type(found, width, width)
    assert len(at_most_precision(beside(compiled(h200, jnp.float32)))) > 6
