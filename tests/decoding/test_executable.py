"""What XLA's CPU backend makes of a chunk of decoding: nothing as large as a pool or weight moves.

The CPU backend keeps each scatter into a pool as one fused scatter of the pool's own shape, done in
place, since the pool is donated and every read of it comes before or after; and reads ``[N, K]``
weights where they lie (a bfloat16 weight is widened inside the product, a tile at a time).
"""

import re

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.cache import Geometry, init_cache, plan
from kvjax.decoding import DecodeState, decode_chunk
from tests.decoding import small
from tests.models import goldens

INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = \w+\[([0-9,]+)\]\S* ([\w\-]+)\(", re.M)
NAMES = {"parameter", "get-tuple-element", "bitcast", "fusion"}
"""Instructions that move nothing; what a fusion does is listed in its own computation."""


def moved(text: str, shapes: set[tuple[int, ...]]) -> set[str]:
    """What is done to arrays of these shapes, in any order of their axes."""
    shapes = {tuple(sorted(shape)) for shape in shapes}
    found = set()
    for dims, operation in INSTRUCTION.findall(text):
        if tuple(sorted(map(int, dims.split(",")))) in shapes:
            found.add(operation)
    return found - NAMES


def compiled(lm: kvjax.LanguageModel, rows: int):
    config = lm.config
    geometry = Geometry.full(
        num_layers=config.num_layers,
        rows=rows,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=16,
        pages_per_head=499,
        dtype=lm.dtype,
    )
    zeros = jnp.zeros(rows, jnp.int32)
    state = DecodeState(init_cache(geometry), zeros, zeros, jnp.ones(rows, bool))
    lowered = decode_chunk.lower(
        lm.model, state, None, zeros == 1, steps=4, stop_ids=(1,), width=256
    )
    return geometry, lowered.compile()


@pytest.mark.usefixtures("unchecked")  # lowering builds pytrees of no arrays
@pytest.mark.parametrize(
    ("dtype", "rows"),
    [("float32", 2), pytest.param("bfloat16", 2, marks=pytest.mark.slow), ("bfloat16", 1)],
)
def test_pools_and_weights_stay_where_they_are(dtype, rows):
    lm = kvjax.load(goldens.FOLDER / "llama", dtype=dtype)
    geometry, program = compiled(lm, rows)
    text = program.as_text()
    assert len(re.findall(r" while\(", text)) == 1
    [shape] = geometry.layers[0].classes
    pages, page, dim = geometry.pages(shape), shape.page_size, geometry.head_dim
    assert moved(text, {(pages, page, dim), (pages, page)}) == {"scatter"}

    weights = [leaf for leaf in jax.tree.leaves(lm.model) if leaf.ndim > 1]
    flat = {(weight.size // weight.shape[-1], weight.shape[-1]) for weight in weights}
    assert moved(text, {weight.shape for weight in weights} | flat) == set()

    memory = program.memory_analysis()
    # The state is updated in place: nearly all that comes out is what went in.
    assert memory.alias_size_in_bytes >= geometry.nbytes
    assert memory.temp_size_in_bytes < geometry.pool_bytes / len(geometry.layers)


def test_what_moves_would_be_seen():
    def body(pool, _):
        turned = pool.swapaxes(1, 2) * 2
        return jnp.cumsum(turned.swapaxes(1, 2), 1), turned.sum()

    program = jax.jit(lambda pool: jax.lax.scan(body, pool, length=3)).lower(jnp.ones((501, 16, 8)))
    assert moved(program.compile().as_text(), {(501, 16, 8)}) - {"scatter"}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("guarded", [True, False])
def test_coded_pages_are_decoded_in_every_step_and_not_ahead_of_all(guarded, monkeypatch):
    """They stay as they are through the chunk; decoded once, they take what coding them saves."""
    lm = small.lm()
    recipe = kvjax.recipes.uniform("int4", page_size=16)
    geometry = plan(
        lm.config,
        recipe,
        batch_size=1,
        prompt_tokens=4096,
        max_new_tokens=64,
        dtype=lm.dtype,
        parameter_bytes=0,
    ).geometry
    if not guarded:
        monkeypatch.setattr(jax.lax, "optimization_barrier", lambda x: x)
    zeros = jnp.zeros(1, jnp.int32)
    state = DecodeState(init_cache(geometry), zeros, zeros, jnp.ones(1, bool))

    def anew(*args, **static):  # what was traced before may not serve again
        return decode_chunk.__wrapped__(*args, **static)

    chunk = jax.jit(anew, static_argnames=("steps", "stop_ids", "recipe"), donate_argnums=1)
    program = chunk.lower(
        lm.model, state, None, zeros == 1, steps=4, stop_ids=(), recipe=recipe
    ).compile()
    held = geometry.layers[0].classes[1].capacity
    decoded = 2 * held * geometry.num_kv_heads * geometry.head_dim * 4
    layers = len(geometry.layers)
    assert (program.memory_analysis().temp_size_in_bytes < decoded * (layers - 1)) == guarded
