"""Logical position, live slots and the slot of a write are three things."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from kvjax import recipes
from kvjax.cache import evict, reserve
from kvjax.decoding import prefill_chunk
from kvjax.decoding.chunk import decode_token
from pallas_kernels import SCRATCH_PAGE
from tests.decoding import small
from tests.faults import cached
from tests.recipes import oracle
from tests.recipes.test_budget import made
from tests.recipes.test_survivors import states

PROMPT = small.prompts([40])[0]
FULL = recipes.full(16)


def read(lm, recipe=FULL):
    ids = np.zeros((1, 64), np.int32)
    ids[0, : len(PROMPT)] = PROMPT
    zeros = jnp.zeros((1, lm.config.vocab_size))
    cache = cached.empty(lm, recipe, 64)
    cache, _ = prefill_chunk(lm.model, cache, zeros, ids, np.int32([len(PROMPT)]), recipe=recipe)
    return reserve(cache, cache.length + 1)


def step(model, cache, recipe=FULL):
    token, active = jnp.array([5], jnp.int32), jnp.ones(1, bool)
    return decode_token(model, cache, token, active, None, recipe)


def test_after_an_eviction_the_next_token_stands_where_it_would_have_stood():
    """Half of the tokens go, others in every layer; what is left is attended as it was."""
    lm, rng = small.lm(), np.random.default_rng(0)
    cache = read(lm)
    keep = rng.permuted(np.tile(np.arange(40) % 2 == 0, (3, 1)), axis=1)
    layers = []
    for layer, mask in zip(cache.layers, keep, strict=True):
        pos = np.asarray(layer.pools[0].pos[layer.tables[0]])
        layers.append(evict(layer, 0, jnp.asarray((pos >= 0) & mask[np.maximum(pos, 0) % 40])))
    cache = dataclasses.replace(cache, layers=tuple(layers))
    logits, after = jax.jit(step)(lm.model, cache)
    assert after.length.tolist() == [41]
    seen = np.tile(np.tri(41, dtype=bool), (3, 1, 1))
    seen[:, 40, :40] = keep
    expected = oracle.logits(lm, [*PROMPT, 5], seen)[40]
    np.testing.assert_allclose(logits[0], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    # A position counted by what is left would be seen.
    early = dataclasses.replace(cache, length=jnp.array([20], jnp.int32))
    wrong, _ = jax.jit(step)(lm.model, early)
    assert np.abs(wrong[0] - expected).max() > 1e-2 * np.abs(expected).max()


def test_pages_do_not_grow_with_the_answer():
    """Slots of evicted tokens are taken again, so that a long answer owns what a short one owns."""
    recipe = made("h2o", codec="int4", budget=48)
    most = -(-(48 + recipe.tick) // recipe.page_size)
    lengths, owned = [], []
    for state in states(small.lm(), PROMPT, recipe, 30 * recipe.tick):
        lengths.append(int(state.cache.length[0]))
        owned += [
            int((layer.tables[1] != SCRATCH_PAGE).sum(-1).max()) for layer in state.cache.layers
        ]
        for layer in state.cache.layers:
            live = sum(
                int((pool.bias[table[0, 0]] > -jnp.inf).sum())
                for pool, table in zip(layer.pools, layer.tables, strict=True)
            )
            assert live <= 48 + recipe.tick + recipe.window
    assert lengths[-1] > 10 * 48 and max(owned) <= most


@pytest.mark.parametrize(
    "recipe", [FULL, recipes.uniform("int4", page_size=16)], ids=["full", "int4"]
)
def test_a_page_that_does_not_exist_is_an_index_error_under_checks(recipe):
    """JAX itself would read the last page instead and drop the store; nothing here relies on it."""
    lm = small.lm()
    cache = read(lm, recipe)
    checked = jax.jit(
        checkify.checkify(lambda cache: step(lm.model, cache, recipe), errors=checkify.index_checks)
    )
    error, _ = checked(cache)
    assert error.get() is None
    layer = cache.layers[1]
    for index, table in enumerate(layer.tables):
        bad = table.at[0, 1, 0].set(len(layer.pools[index].bias))
        tables = tuple(bad if i == index else old for i, old in enumerate(layer.tables))
        broken = dataclasses.replace(layer, tables=tables)
        layers = (cache.layers[0], broken, *cache.layers[2:])
        error, _ = checked(dataclasses.replace(cache, layers=layers))
        assert "out-of-bounds" in error.get()
