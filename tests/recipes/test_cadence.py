"""How much a recipe holds, at every step, and what working at every tick changes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.decoding import decode_chunk
from kvjax.decoding.loop import NARROWEST
from tests.decoding import small
from tests.recipes.test_budget import EVICTING, NEW, made, quick_ones
from tests.recipes.test_survivors import states

BUDGET, STEPS = 40, NEW
CODECS = {"rkv": "int4"}  # as in test_budget.py, so that the programs are compiled once


def live(state) -> dict[tuple[int, int], set[int]]:
    """Positions that each layer and head holds, the recent ones too."""
    found = {}
    for index, layer in enumerate(state.cache.layers):
        for pool, table in zip(layer.pools, layer.tables, strict=True):
            pos = np.asarray(pool.pos)[np.asarray(table[0])]
            for head, own in enumerate(pos.reshape(len(pos), -1)):
                found.setdefault((index, head), set()).update(own[own >= 0].tolist())
    return found


@pytest.mark.parametrize(
    "name",
    # snapkv keeps all that it decodes.
    quick_ones([name for name in EVICTING if name != "snapkv"], "rkv"),
)
def test_the_budget_holds_at_every_step(name):
    """A row holds the most right before a tick's end, and the least right after its maintenance."""
    lm, recipe = small.lm(), made(name, budget=BUDGET, codec=CODECS.get(name, "bf16"))
    most = 0
    found = states(lm, small.prompts([70])[0], recipe, STEPS)
    for state in itertools.islice(found, STEPS // recipe.tick):  # the last one is not worked on
        for held in live(state).values():
            assert len(held) <= BUDGET
            assert {int(state.cache.length[0]) - 1, *range(recipe.sinks)} <= held
        state, _ = decode_chunk(
            lm.model,
            jax.tree.map(jnp.copy, state),
            None,
            np.zeros(1, bool),
            steps=recipe.tick,
            stop_ids=(),
            width=NARROWEST,
            recipe=recipe,
        )
        most = max(most, *(len(held) for held in live(state).values()))
    assert BUDGET < most <= BUDGET + recipe.tick + recipe.window


def test_a_tick_keeps_what_every_step_would_have_kept():
    """Recency does not depend on when it is asked, so both cadences meet at every tick."""
    lm, prompt = small.lm(), small.prompts([70])[0]
    by_tick = [
        (int(state.cache.length[0]), live(state))
        for state in states(lm, prompt, made("streaming", budget=BUDGET, codec="bf16"), STEPS)
    ]
    recipe = made("streaming", budget=BUDGET, codec="bf16", tick=1, every=1)
    by_step = {
        int(state.cache.length[0]): live(state) for state in states(lm, prompt, recipe, STEPS)
    }
    compared = 0
    for length, held in by_tick[:-1]:
        assert held == by_step[length]
        assert all(len(positions) <= BUDGET for positions in held.values())
        compared += 1
    assert compared == STEPS // 16
    assert {len(positions) for positions in by_tick[1][1].values()} == {BUDGET}
