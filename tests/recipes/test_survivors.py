"""What stays in the cache stays as it is: over long runs, around windows, at every cadence."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import recipes
from kvjax.cache import init_cache, plan
from kvjax.decoding import decode_chunk, prefill_chunk, start_decoding
from kvjax.decoding.loop import NARROWEST
from kvjax.decoding.maintain import maintain
from pallas_kernels import SCRATCH_PAGE
from tests.decoding import small
from tests.recipes.test_budget import OPTIONS, decode, made, tokens


def states(lm, prompt, recipe, steps: int):
    """The state after the prompt, and after every tick of ``steps`` decoded tokens."""
    planned = plan(
        lm.config,
        recipe,
        batch_size=1,
        prompt_tokens=len(prompt),
        max_new_tokens=steps,
        dtype=lm.dtype,
        parameter_bytes=0,
    )
    padded = np.zeros((1, max(16, 1 << (len(prompt) - 1).bit_length())), np.int32)
    padded[0, : len(prompt)] = prompt
    cache, logits = prefill_chunk(
        lm.model,
        init_cache(planned.geometry),
        jnp.zeros((1, lm.config.vocab_size)),
        padded,
        np.int32([len(prompt)]),
        recipe=recipe,
    )
    state, _ = start_decoding(cache, logits, None, jnp.full(1, steps + 9, jnp.int32), stop_ids=())
    halt = np.zeros(1, bool)
    for done in range(0, steps, recipe.tick):
        if done:
            state = maintain(state, ~halt, config=lm.config, recipe=recipe, done=done)
        yield state
        state, _ = decode_chunk(
            lm.model,
            state,
            None,
            halt,
            steps=recipe.tick,
            stop_ids=(),
            width=NARROWEST,
            recipe=recipe,
        )
    yield state


def slots(state) -> dict[tuple, bytes]:
    """What every live slot outside the recent window says, by layer, head and position."""
    found = {}
    for index, layer in enumerate(state.cache.layers):
        for pool, table in zip(layer.pools[1:], layer.tables[1:], strict=True):
            parts = {
                name: np.asarray(getattr(pool, name))
                for name in ("k", "v", "k_scale", "v_scale", "bias")
                if getattr(pool, name) is not None
            }
            pos = np.asarray(pool.pos)
            for head, pages in enumerate(np.asarray(table[0])):
                for page in pages[pages != SCRATCH_PAGE]:
                    for slot in np.flatnonzero(pos[page] >= 0):
                        what = [
                            part[page, :, slot] if name.startswith("v") else part[page, slot]
                            for name, part in parts.items()
                        ]
                        key = index, head, int(pos[page, slot])
                        assert key not in found, "a token is there twice"
                        found[key] = b"".join(np.asarray(x).tobytes() for x in what)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["streaming", "rkv"])
def test_survivors_are_byte_identical_over_a_thousand_steps(name):
    lm = small.lm()
    recipe = made(name, codec="int4", budget=48)
    first: dict[tuple, bytes] = {}
    gone: set[tuple] = set()
    seen = 0
    for state in states(lm, small.prompts([30])[0], recipe, 1008):
        now = slots(state)
        for key, what in now.items():
            assert first.setdefault(key, what) == what
        assert not gone & now.keys(), "an evicted token came back"
        gone |= first.keys() - now.keys()
        seen = max(seen, len(now))
    assert int(state.cache.length[0]) == 30 + 1008
    assert len(gone) > 10 * seen


@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("method", [pytest.param("uniform", marks=pytest.mark.slow), "full"])
@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("qwen2_window", marks=pytest.mark.slow)])
def test_sliding_windows_are_exact_around_their_size(name, method, beyond):
    """Layers with a window are never compressed below it, and hold no more than it takes."""
    lm = small.lm(name)
    window = max(size for size in lm.config.windows if size is not None)
    recipe = recipes.full(4) if method == "full" else recipes.uniform("bf16", page_size=4)
    prompts = small.prompts([window + beyond, 30 + beyond])
    results = decode(lm, prompts, recipe)
    for prompt, result in zip(prompts, results, strict=True):
        sequence = [*prompt, *result.tokens]
        chosen = np.asarray(kvjax.forward(lm, sequence + [0] * (96 - len(sequence)))[0]).argmax(-1)
        assert result.tokens == tuple(chosen[len(prompt) - 1 : len(sequence) - 1])
    recent = 0 if method == "full" else recipe.tick + recipe.window
    for size, layer in zip(lm.config.windows, results[1].report["kv"]["per_layer"], strict=True):
        if size is not None:
            assert size <= layer["live_tokens"] <= size + recent + recipe.page_size


def test_a_prompt_that_is_longer_than_chunk_and_budget():
    """It is compressed while it is read, and its first and last tokens are there at the end."""
    lm = small.lm()
    recipe = made("h2o", budget=128, codec="bf16")
    prompt = small.prompts([2500])[0]
    state = next(states(lm, prompt, recipe, 16))
    held = {(layer, head): set() for layer in range(3) for head in range(2)}
    for layer, head, position in slots(state):
        held[layer, head].add(position)
    recent = set(range(2500 - recipe.recent, 2500 - recipe.window))
    for positions in held.values():
        assert len(positions) == 128 - recipe.window
        assert set(range(OPTIONS["sinks"])) | recent <= positions
    assert len({frozenset(positions) for positions in held.values()}) > 1


@pytest.mark.slow
def test_selecting_at_every_step_or_at_every_tick():
    """Both hold their budget; where nothing has to go, both say the same."""
    lm = small.lm()
    prompts = small.prompts([40, 12])
    often = {"tick": 1, "every": 1}
    for name in ("tova", "h2o"):
        ample = [
            tokens(decode(lm, prompts, made(name, budget=200, codec="bf16", **options)))
            for options in ({}, often)
        ]
        assert ample[0] == ample[1]
        tight = decode(lm, prompts, made(name, budget=44, codec="bf16", **often))
        assert max(result.report["kv"]["live_tokens"]["max"] for result in tight) <= 44 + 1


def test_a_class_that_is_full_takes_no_more_and_counts_what_it_misses():
    from kvjax.compress.policy import policies
    from kvjax.compress.selection import Rows
    from kvjax.compress.settle import Incoming, settle

    lm = small.lm()
    recipe = recipes.uniform("bf16", page_size=16)
    [policy] = set(policies(recipe, lm.config))
    planned = plan(
        lm.config,
        recipe,
        batch_size=1,
        prompt_tokens=64,
        max_new_tokens=1,
        dtype=lm.dtype,
        parameter_bytes=0,
    )
    layer = planned.geometry.layers[0]
    first, stored = layer.classes
    little = dataclasses.replace(stored, pages_per_head=2)
    geometry = dataclasses.replace(
        planned.geometry, layers=(dataclasses.replace(layer, classes=(first, little)),)
    )
    [cached] = init_cache(geometry).layers
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((1, 64, 2, 8)), jnp.float32) for _ in range(2))
    at = {name: jnp.array([n], jnp.int32) for name, n in (("zero", 0), ("n", 64), ("out", 48))}
    rows = Rows(
        at["zero"], at["n"], at["n"], at["zero"], at["out"], jnp.array([True]), jnp.int32(0)
    )
    cached, crowded = settle(
        cached, 0, recipe, policy, lm.config.scale, None, rows, Incoming(k, v), select=False
    )
    # 48 tokens leave the window, and two pages of 16 take 32 of each of the two heads.
    assert crowded.tolist() == [2 * 16]
    [pool], [table] = cached.pools[1:], cached.tables[1:]
    for head in range(2):
        held = [int(p) for p in np.asarray(pool.pos[table[0, head]]).ravel() if p >= 0]
        assert sorted(held) == list(range(32))
