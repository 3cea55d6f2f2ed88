"""SnapKV among tokens whose latents are kept, against NumPy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.compress.selectors import H2O, SegmentQuotas, SnapKV
from kvjax.decoding import prefill_chunk
from kvjax.decoding.empty import empty_cache
from kvjax.dynakv.forward import plain_attention, read, through
from kvjax.errors import UsageError
from kvjax.models.rope import rotate
from tests.dynakv.decoding import BLOCK, BLOCKS, TOTAL, Run, planned
from tests.dynakv.tiny import with_settings

BUDGET, WINDOW = 42, 16


def selected_by_hand(run: Run, layer, row: int, length: int, budget: int, window: int):
    """Positions that SnapKV's votes, averaged over heads, leave of a row's prompt."""
    lm, ids = run.lm, run.ids[row : row + 1, :length]

    def attend(index, module, angles, own, q, k, v, sinks):
        spectra, bases = own
        k, v = (
            through(spectrum, basis, x, "hard")[0]
            for spectrum, basis, x in zip(
                (spectra.keys, spectra.values), bases, (k, v), strict=True
            )
        )
        k = rotate(k, *angles)
        return plain_attention(lm.config, index, q, k, v, sinks), (q[0], k[0])

    blocked = with_settings(run.spectra, rank_multiple=BLOCK)
    beside = list(zip(blocked.layers, blocked.bases(), strict=True))
    _, notes = read(lm.model, jnp.asarray(ids), attend, beside, keys="normed")
    q, k = map(np.asarray, notes[layer])
    votes = np.zeros((lm.config.num_kv_heads, length))
    for head in range(lm.config.num_heads):
        own = head // lm.config.group
        for at in range(length - window, length):
            logits = k[: at + 1, own] @ q[at, head] * lm.config.scale
            weights = np.exp(logits - logits.max())
            votes[own, : at + 1] += weights / weights.sum() / lm.config.group
    votes[:, length - window :] = 0
    pooled = np.stack([np.convolve(v, np.ones(5) / 5, "same") for v in votes]).mean(0)
    must = [p for p in range(length) if p < 4 or p >= length - 32]
    rest = sorted((p for p in range(length) if p not in must), key=lambda p: -pooled[p])
    return sorted(must + rest[: budget - len(must)])


def with_selector(run: Run, budget: int) -> kvjax.recipes.Recipe:
    return dataclasses.replace(run.recipe, selector=SnapKV(window=WINDOW), budget=budget, every=0)


def read_prompt(run: Run, recipe: kvjax.recipes.Recipe):
    """The layers of the cache after a prompt in two pieces, and the tokens that left its window.

    The first piece is within the budget, so that the second evicts tokens that are stored.
    """
    lm, half = run.lm, TOTAL // 2
    cache = empty_cache(lm, planned(lm, recipe, prompt=TOTAL).geometry)
    logits = jnp.zeros((len(run.ids), lm.config.vocab_size), jnp.float32)
    for piece in (run.ids[:, :half], run.ids[:, half:]):
        padded, count = np.pad(piece, ((0, 0), (0, 64 - half))), np.full(len(piece), half, np.int32)
        cache, logits = prefill_chunk(lm.model, cache, logits, padded, count, recipe=recipe)
    return cache.layers, np.asarray(cache.stored)


def positions(layer, row: int, line: int) -> set[int]:
    """Of the tokens that a line of the table of latents holds."""
    pool, table = layer.pools[1], layer.tables[1]
    return set(np.asarray(pool.pos[table[row, line]]).ravel().tolist()) - {-1}


def test_one_set_of_tokens_stays_for_all_heads(plain):
    """At their own positions, each with all of its blocks; a budget that holds all keeps all."""
    layers, stored = read_prompt(plain, with_selector(plain, BUDGET))
    ample, _ = read_prompt(plain, with_selector(plain, TOTAL))
    for row, count in enumerate(stored):
        kept = selected_by_hand(plain, 0, row, TOTAL, BUDGET, WINDOW)
        assert positions(layers[0], row, 0) == {p for p in kept if p < count}
        assert len(kept) == BUDGET < TOTAL
        for line in range(2 * BLOCKS):
            whole = positions(ample[0], row, line)
            assert positions(layers[0], row, line) == whole & set(kept)
            # Layer 1 has keys of its own, and chose others.
            assert positions(layers[1], row, line) <= positions(layers[1], row, 0)
        for layer in ample:
            assert positions(layer, row, 0) == set(range(count))
        assert len(positions(layers[1], row, 0)) == BUDGET - (TOTAL - count)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selector": H2O()}, "selector H2O needs more than keys and queries"),
        ({"selector": SegmentQuotas()}, "selector SegmentQuotas needs more than keys"),
        ({"selector": SnapKV(), "budget": 20}, "budget 20 is below the 4 first and the 32 last"),
        ({"selector": SnapKV(), "once": True, "every": 16}, "once has no effect on latents"),
        ({"positions": "contiguous"}, "positions has no effect on latents"),
    ],
)
def test_what_cannot_be_selected_by_is_refused(plain, options, message):
    with pytest.raises(UsageError, match=message):
        kvjax.recipes.dynakv(plain.recipe.projector.folder, **options)


def test_a_selector_comes_with_a_budget(plain):
    recipe = kvjax.recipes.dynakv(plain.recipe.projector.folder, selector=SnapKV())
    assert (recipe.budget, recipe.every, recipe.page_size) == (1024, 0, 16)
