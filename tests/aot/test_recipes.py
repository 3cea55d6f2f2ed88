"""What compressing recipes become on a GPU: pools stay where they are, and are read as codes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax import recipes
from kvjax.cache import init_cache, plan
from kvjax.compress.policy import policies
from kvjax.compress.selection import Rows
from kvjax.decoding import DecodeState, decode_chunk
from kvjax.decoding.maintain import _refresh, _rows, _settle
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.recipes import Recipe
from kvjax.thoughts import Sparsity
from kvjax.thoughts.pages import Segments
from tests.aot.checks import gathered
from tests.aot.test_programs import SHAPE, array

pytestmark = pytest.mark.aot
LAYERS = 2
CONFIG = ModelConfig.from_hf({**SHAPE, "num_hidden_layers": LAYERS})
RECIPES = {
    "uniform": recipes.uniform("int4"),
    "kivi": recipes.kivi("kivi2"),
    "streaming": recipes.streaming(budget=4096),
    "contiguous": recipes.streaming(budget=4096, positions="contiguous", codec="int8"),
    "random": recipes.random(budget=4096, codec="int8"),
    "h2o": recipes.h2o(budget=4096),
    "tova": recipes.tova(budget=4096, codec="fp8"),
    "snapkv": recipes.snapkv(budget=4096),
    "snapkv_decode": recipes.snapkv_decode(budget=4096, codec="int4"),
    "rkv": recipes.rkv(budget=4096, codec="k4v2"),
    "thinkv": recipes.thinkv(budget=4096, segmenter=Sparsity((0,), (0.4, 0.6))),
    "tam": recipes.tam(budget=4096, codec="int4"),
}


def state_of(recipe: Recipe, rows: int = 2) -> DecodeState:
    geometry = plan(
        CONFIG,
        recipe,
        batch_size=rows,
        prompt_tokens=8192,
        max_new_tokens=128,
        dtype=jnp.bfloat16,
        parameter_bytes=0,
    ).geometry
    cache = jax.eval_shape(lambda: init_cache(geometry))
    number, flag = array((rows,), jnp.int32), array((rows,), jnp.bool_)
    return DecodeState(cache, number, number, flag)


def copied(program, pools) -> list[str]:
    """Copies and transpositions of an array as large as one of the pools'."""
    sizes = {leaf.size for leaf in jax.tree.leaves(pools) if leaf.size > 2**17}
    assert sizes
    return [
        str(instruction)
        for instruction in program.module.executed()
        if instruction.opcode in ("copy", "copy-start", "transpose")
        and sizes & set(instruction.sizes)
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_decode_chunk(h200, name):
    recipe, state = RECIPES[name], state_of(RECIPES[name])
    model = nnx.eval_shape(lambda: Decoder(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    program = h200.compile(
        decode_chunk, model, state, None, state.finite, steps=16, stop_ids=(1,), recipe=recipe
    )
    assert copied(program, [layer.pools for layer in state.cache.layers]) == []
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.cache))
    assert program.aliased >= held
    assert program.module.waits() == []
    kernels = [launch for launch in program.launches if launch.name.startswith("paged_attention")]
    pools = [pool for layer in state.cache.layers for pool in layer.pools]
    codes = frozenset(leaf.size for pool in pools for leaf in (pool.k, pool.v))
    if name == "kivi":  # the slots of its pages share scales, and there is no kernel for that
        assert gathered(program, codes) and not kernels
    else:
        assert gathered(program, codes) == []
        assert len(kernels) == len(pools) and all(launch.captured for launch in kernels)


@pytest.mark.parametrize(
    ("name", "selects"),
    [
        ("uniform", False),
        ("kivi", False),
        ("streaming", True),
        ("random", True),
        ("h2o", True),
        ("tova", True),
        ("snapkv_decode", True),
        ("rkv", True),
        ("thinkv", False),
        ("thinkv", True),
        ("tam", True),
    ],
)
def test_maintenance(h200, name, selects):
    recipe, state = RECIPES[name], state_of(RECIPES[name])
    layer = state.cache.layers[-1]
    number = state.token
    rows = Rows(number, number, number, number, number, state.finite, array((), jnp.int32))
    segments = None if recipe.retention is None else Segments(number, number, 128)
    program = h200.compile(
        _settle,
        layer,
        rows,
        state.cache.thoughts,
        segments,
        number,
        np.int32(1),
        None,
        state.finite,
        recipe=recipe,
        policy=policies(recipe, CONFIG)[-1],
        scale=CONFIG.scale,
        window=None,
        select=selects and recipe.retention is None,
        closing=selects and recipe.retention is not None,
        demotes=selects and recipe.retention is not None,
        classes=None,
    )
    assert copied(program, layer.pools) == []
    assert program.module.waits() == []
    launches = [launch.name for launch in program.launches]
    # Slots that share scales are coded and stored by XLA.
    stores = [name for name in launches if name.startswith("write_slots")]
    assert len(stores) == sum(pool.uniform for pool in layer.pools[1:])
    levels = recipe.retention.schedule if selects and recipe.retention else ()
    assert sum(name.startswith("cluster_centers") for name in launches) == len(levels)
    assert program.aliased >= sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((layer.pools, layer.tables))
    )
    if not recipe.needs_queries:  # those decode the keys that they look at
        pool = dataclasses.asdict(jax.tree.map(lambda x: x.size * x.dtype.itemsize, layer.pools[1]))
        assert program.temporary < pool["k"]


def test_thoughts_hold_no_launch_up(h200):
    """What tells them apart and what demotes them run behind a chunk, and the host goes on."""
    recipe, state = RECIPES["thinkv"], state_of(RECIPES["thinkv"])
    cache, number = state.cache, state.token
    given = cache.thoughts, (array(number.shape, jnp.float32),), cache.length, cache.prompt
    told = h200.compile(_refresh, *given, number, state.finite, recipe=recipe)
    counters = cache.length, cache.prompt, cache.stored, cache.thoughts, number
    masks = state.finite, state.finite, array((), jnp.int32)
    fitted = h200.compile(_rows, *counters, *masks, config=CONFIG, recipe=recipe)
    assert told.module.waits() == fitted.module.waits() == []


def test_a_launch_that_waits_would_be_seen(h200):
    """As the fit did when it demoted one segment after the other, while any was over."""

    def halve(x):
        return jax.lax.while_loop(lambda x: x[0] > 1, lambda x: x // 2, x)

    def choose(x):
        return jax.lax.cond(x[0] > 1, jnp.sort, jnp.cumsum, x)

    for function in (halve, choose):
        program = h200.compile(jax.jit(function), array((64,), jnp.int32))
        assert len(program.module.waits()) == 1


def test_a_copy_would_be_seen(h200):
    """A pool that is not donated has to be copied before it is written to."""
    pool = state_of(RECIPES["uniform"]).cache.layers[0].pools[1]

    def change(pool):
        return pool.k.at[3].set(0)

    assert copied(h200.compile(jax.jit(change), pool), pool)
    assert copied(h200.compile(jax.jit(change, donate_argnums=0), pool), pool) == []
