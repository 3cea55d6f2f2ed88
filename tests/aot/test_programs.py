"""Prefill and decoding compiled for an H200: nothing as large as the cache or a weight is copied.

Each check is shown to fail on a program made wrong on purpose.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kvjax.cache import init_cache, plan
from kvjax.decoding.chunk import DecodeState, decode_chunk, start_decoding
from kvjax.decoding.prefill import prefill_chunk
from kvjax.models import decoder
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.models.layers import linear
from kvjax.recipes import full
from pallas_kernels import paged_attention, write_slots
from tests.aot.checks import Sizes, gathered, loop_problems, memory_problems

pytestmark = pytest.mark.aot

LAYERS = 2
# Llama 3.1 8B, but for its depth.
SHAPE = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
DECODE = {"steps": 16, "stop_ids": (128001, 128009)}


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of a model and of its cache, as nothing is run."""

    model: Decoder
    state: DecodeState

    @classmethod
    def of(cls, rows: int, tokens: int) -> "Case":
        config = ModelConfig.from_hf(SHAPE)
        geometry = plan(
            config,
            full(),
            batch_size=rows,
            prompt_tokens=tokens,
            max_new_tokens=128,
            dtype=jnp.bfloat16,
            parameter_bytes=0,
        ).geometry
        model = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        cache = jax.eval_shape(lambda: init_cache(geometry))
        number, flag = array((rows,), jnp.int32), array((rows,), jnp.bool_)
        return cls(model, DecodeState(cache, number, number, flag))

    @property
    def sizes(self) -> Sizes:
        return Sizes.of(self.model, self.state.cache)

    def chunk_arguments(self) -> tuple:
        return self.model, self.state, None, self.state.finite


def array(shape, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# Contexts for which a pool is larger than anything that a step computes.
@pytest.fixture(scope="module", params=[(1, 8192), (32, 1024)], ids=["1 row", "32 rows"])
def case(request):
    return Case.of(*request.param)


@pytest.fixture(scope="module")
def small():
    """For the mutants."""
    return Case.of(1, 8192)


def test_decode_chunk(h200, case):
    program = h200.compile(decode_chunk, *case.chunk_arguments(), **DECODE)
    assert memory_problems(program, case.sizes) == {}
    assert loop_problems(program, case.sizes, LAYERS) == {}


def test_decode_chunk_of_the_first_pages(h200, case):
    program = h200.compile(decode_chunk, *case.chunk_arguments(), **DECODE, width=1024)
    assert memory_problems(program, case.sizes) == {}
    assert loop_problems(program, case.sizes, LAYERS) == {}


def test_decode_chunk_by_mosaic(h200, case):
    program = h200.compile(decode_chunk, *case.chunk_arguments(), **DECODE, kernel="mosaic")
    assert memory_problems(program, case.sizes) == {}
    assert gathered(program, case.sizes.pools) == []
    # By themselves, between command buffers: XLA takes no call of Mosaic's into those.
    calls = [launch for launch in program.launches if launch.kind == "kCustomCall"]
    assert [call.looped for call in calls] == [True] * LAYERS


def test_start_decoding(h200, case):
    rows = case.state.token.shape[0]
    logits = array((rows, SHAPE["vocab_size"]), jnp.float32)
    arguments = case.state.cache, logits, None, case.state.left
    program = h200.compile(start_decoding, *arguments, stop_ids=DECODE["stop_ids"])
    assert memory_problems(program, case.sizes) == {}


def test_prefill_chunk(h200, small):
    logits = array((1, SHAPE["vocab_size"]), jnp.float32)
    tokens = array((1, 16), jnp.int32)
    arguments = small.model, small.state.cache, logits, tokens, small.state.left
    # All its layers in one program, as in a caller's own jit.
    whole = jax.jit(prefill_chunk, donate_argnames=("cache", "logits"))
    program = h200.compile(whole, *arguments)
    assert memory_problems(program, small.sizes) == {}


def compile_mutant(h200, case, donate=("state",), options=None):
    """``decode_chunk`` traced anew, so that it sees what a test has replaced."""

    def mutant(*args, **static):
        return decode_chunk.__wrapped__(*args, **static)

    jitted = jax.jit(
        functools.wraps(decode_chunk.__wrapped__)(mutant),
        static_argnames=("steps", "stop_ids", "width"),
        donate_argnames=donate,
    )
    return h200.compile(jitted, *case.chunk_arguments(), options=options, **DECODE)


def test_a_state_that_is_not_donated_is_found(h200, small):
    program = compile_mutant(h200, small, donate=())
    assert {"copied", "not aliased"} <= memory_problems(program, small.sizes).keys()


def test_attention_that_gathers_is_found(h200, small):
    program = h200.compile(decode_chunk, *small.chunk_arguments(), **DECODE, kernel="xla")
    problems = loop_problems(program, small.sizes, LAYERS)
    assert {"kernels", "gathered"} <= problems.keys()
    assert problems["kernels"] == [f"0 of {LAYERS} paged_attention in a command buffer"]


def test_weights_that_are_rearranged_are_found(h200, small, monkeypatch):
    def product(x, weight, bias=None, *, dtype=None):
        return linear(x, jnp.roll(weight, 1, axis=-1), bias, dtype=dtype)

    monkeypatch.setattr(decoder, "linear", product)
    program = compile_mutant(h200, small)
    assert {"copied", "temporary"} == memory_problems(program, small.sizes).keys()


def test_launches_one_by_one_are_found(h200, small):
    program = compile_mutant(h200, small, options={"xla_gpu_graph_min_graph_size": 10**6})
    assert {"kernels", "not captured"} == loop_problems(program, small.sizes, LAYERS).keys()


def test_stacked_layers_are_found(h200, small):
    """A scan over layers moves every layer's weights and pages out of the stack and back."""
    layer, matrix = small.state.cache.layers[0], small.model.layers[0].attn.out.get_value()
    stacked = jax.tree.map(
        lambda x: array((LAYERS, *x.shape), x.dtype), (layer.pools[0], layer.tables[0], matrix)
    )

    def read(x, layer):
        pool, table, matrix = layer
        new = x.reshape(1, 32, 1, 128)[:, :8]
        zeros = jnp.zeros((1, 8, 1), jnp.int32)
        pool = write_slots(pool, zeros, zeros, new, new, zeros[:, 0])
        out, _ = paged_attention(x.reshape(1, 32, 128), [pool], [table], scale=0.1)
        return x + out.reshape(x.shape).astype(x.dtype) @ matrix, pool

    @functools.partial(jax.jit, donate_argnums=1)
    def decode(x, pools, tables, matrices):
        def step(carry, _):
            return jax.lax.scan(read, carry[0], (carry[1], tables, matrices)), None

        return jax.lax.scan(step, (x, pools), None, length=16)[0]

    pools, tables, matrices = stacked
    program = h200.compile(decode, array((1, 4096), jnp.bfloat16), pools, tables, matrices)
    assert {"copied", "temporary"} <= memory_problems(program, small.sizes).keys()
