"""Programs compiled for four H200s that share a model: what they tell each other, and no more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, use_abstract_mesh

from kvjax import recipes
from kvjax.cache import KVCache, plan
from kvjax.compress.policy import policies
from kvjax.compress.selection import Rows
from kvjax.decoding import DecodeState, decode_chunk
from kvjax.decoding.empty import spread_cache
from kvjax.decoding.maintain import _settle
from kvjax.models.decoder import Decoder
from kvjax.sharding import per_shard, specs
from kvjax.sharding.across import gathered
from kvjax.thoughts.pages import Segments
from tests.aot.checks import Sizes, memory_problems
from tests.aot.test_programs import DECODE, array
from tests.aot.test_recipes import CONFIG, LAYERS, RECIPES, copied

pytestmark = pytest.mark.aot
RECIPE = {"full": recipes.full(), "thinkv": RECIPES["thinkv"], "snapkv": RECIPES["snapkv_decode"]}
ROWS = 2


def cache_of(host, recipe, tokens: int = 8192) -> KVCache:
    geometry = plan(
        CONFIG,
        recipe,
        batch_size=ROWS,
        prompt_tokens=tokens,
        max_new_tokens=128,
        dtype=jnp.bfloat16,
        parameter_bytes=0,
        tp=host.mesh.size,
    ).geometry
    with use_abstract_mesh(host.mesh.abstract_mesh):
        return jax.eval_shape(lambda: spread_cache(None, geometry=geometry))


def on_one(host, tree):
    """What one of the devices has of shapes."""
    leaves, structure = jax.tree.flatten(tree)
    places = [NamedSharding(host.mesh, spec) for spec in specs(tree, host.mesh.size)]
    return structure.unflatten(
        array(place.shard_shape(leaf.shape), leaf.dtype)
        for place, leaf in zip(places, leaves, strict=True)
    )


def crossing(instructions) -> dict[str, list[int]]:
    """Numbers of elements that each kind of collective makes."""
    found: dict[str, list[int]] = {}
    for instruction in instructions:
        kind = instruction.opcode.removesuffix("-start")
        if kind in ("all-reduce", "all-gather", "all-to-all", "collective-permute",
                    "reduce-scatter", "collective-broadcast"):  # fmt: skip
            found.setdefault(kind, []).append(max(instruction.sizes))
    return {kind: sorted(sizes) for kind, sizes in found.items()}


@pytest.mark.parametrize("name", RECIPE)
def test_decode_chunk(four_h200s, name):
    recipe, cache = RECIPE[name], cache_of(four_h200s, RECIPE[name])
    number, flag = array((ROWS,), jnp.int32), array((ROWS,), jnp.bool_)
    state = DecodeState(cache, number, number, flag)
    model = nnx.eval_shape(lambda: Decoder(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    program = four_h200s.compile(decode_chunk, model, state, None, flag, **DECODE, recipe=recipe)
    # Two products of a layer are summed, and the embeddings; everybody gets the logits.
    hidden = ROWS * CONFIG.hidden_size
    looped = [instruction for instruction, _ in program.module.looped()]
    assert crossing(looped) == {
        "all-reduce": [hidden] * (2 * LAYERS + 1),
        "all-gather": [ROWS * CONFIG.vocab_size],
    }
    # After the loop the host is told what the rows hold: a few numbers for all layers.
    rest = crossing(program.module.executed())["all-reduce"][: -2 * LAYERS - 1]
    assert all(size <= ROWS * LAYERS * 8 for size in rest)
    own = on_one(four_h200s, cache)
    if name == "full":
        assert memory_problems(program, Sizes.of(on_one(four_h200s, model), own)) == {}
    assert copied(program, [layer.pools for layer in own.layers]) == []
    assert program.aliased >= sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(own))


def test_maintenance(four_h200s):
    """Heads are worked on where they are."""
    recipe = RECIPE["thinkv"]
    cache = cache_of(four_h200s, recipe)
    number, flag = array((ROWS,), jnp.int32), array((ROWS,), jnp.bool_)
    rows = Rows(number, number, number, number, number, flag, array((), jnp.int32))
    program = four_h200s.compile(
        _settle,
        cache.layers[-1],
        rows,
        cache.thoughts,
        Segments(number, number, 128),
        number,
        np.int32(1),
        None,
        flag,
        recipe=recipe,
        policy=policies(recipe, CONFIG)[-1],
        scale=CONFIG.scale,
        window=None,
        select=False,
        closing=True,
        demotes=True,
        classes=None,
    )
    assert crossing(program.module.executed()) == {"all-reduce": [ROWS]}


def test_a_cache_that_is_moved_would_be_seen(four_h200s):
    layer = cache_of(four_h200s, RECIPE["full"]).layers[0]

    @jax.jit
    @per_shard
    def all_pages(layer):
        return gathered(layer.pools[0].k, axis=0)

    program = four_h200s.compile(all_pages, layer)
    assert crossing(program.module.executed()) == {"all-gather": [layer.pools[0].k.size]}
