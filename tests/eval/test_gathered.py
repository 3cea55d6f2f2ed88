"""The peer that gathers its survivors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.compress.selectors import RKV
from kvjax.eval import bench_decode
from kvjax.eval.gathered import cut, decode, empty
from tests.dynakv.tiny import tiny

SELECTOR = RKV(window=4, kernel=3)
SLOTS, BUDGET = 24, 14


def run(steps: int):
    lm = tiny("llama", 2)
    state = empty(lm.config, 2, SLOTS, SELECTOR, jnp.float32)
    state = state._replace(token=jnp.array([3, 7], jnp.int32))
    return lm, *decode(lm.model, state, steps=steps)


@pytest.fixture(scope="module")
def filled():
    lm, state, tokens = run(20)
    return lm, jax.device_get(state), np.asarray(tokens)


def test_until_a_cut_it_is_the_model(filled):
    lm, state, tokens = filled
    given = np.concatenate([[[3, 7]], tokens[:-1]])
    logits = kvjax.forward(lm, given.T)
    np.testing.assert_array_equal(np.asarray(logits).argmax(-1).T, tokens)
    assert state.held == state.length == 20


def test_a_cut_keeps_the_highest_scores_in_order(filled):
    _, before, _ = filled
    given = jax.tree.map(jnp.asarray, before)
    after = jax.device_get(cut(given, scale=4**-0.5, selector=SELECTOR, budget=BUDGET))
    assert (after.held, after.length) == (BUDGET, 20)
    kept_by_head = set()
    for old, new in zip(before.layers, after.layers, strict=True):
        for row in range(2):
            for head in range(new.pos.shape[2]):
                kept = new.pos[row, :BUDGET, head]
                assert (np.diff(kept) > 0).all() and kept[-4:].tolist() == [16, 17, 18, 19]
                for name in ("k", "v"):
                    mine, theirs = (getattr(x, name)[row, :, head] for x in (new, old))
                    np.testing.assert_array_equal(mine[:BUDGET], theirs[kept])
                kept_by_head.add(tuple(kept))
    assert len(kept_by_head) > 1


def test_it_goes_on_from_what_was_kept(filled):
    """The next step's attention is that of a softmax over the kept tokens and its own."""
    lm, before, _ = filled
    given = jax.tree.map(jnp.asarray, before)
    after = cut(given, scale=4**-0.5, selector=SELECTOR, budget=BUDGET)
    poisoned = [layer._replace(v=layer.v.at[:, BUDGET + 3 :].set(1e30)) for layer in after.layers]
    copies = jax.tree.map(lambda leaf: leaf + 0, after)
    clean, _ = decode(lm.model, copies, steps=3)
    found, tokens = decode(lm.model, after._replace(layers=tuple(poisoned)), steps=3)
    assert (found.held, found.length) == (BUDGET + 3, 23)
    np.testing.assert_array_equal(
        clean.layers[1].k[:, : BUDGET + 3], found.layers[1].k[:, : BUDGET + 3]
    )
    assert found.layers[0].pos[:, BUDGET : BUDGET + 3, 0].tolist() == [[20, 21, 22]] * 2
    assert tokens.shape == (3, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [bench_decode.GATHERED, "rkv"])
def test_it_is_timed_beside_the_others(name):
    lm = tiny("llama", 2)
    model = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), lm.model)
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention mixes its types
        found = bench_decode.measure(lm.config, model, name, 64, 2, 512, 2, 4e12)
    assert (found["batch"], found["budget"], len(found["raw_ms"])) == (2, 64, 2)
    assert found["tokens_per_s"] > 0 and found["peak_bytes"] > found["cache_bytes"]
