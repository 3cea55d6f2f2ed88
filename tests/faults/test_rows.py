"""A row's codes are its own: no other row, and no padding, is in a group or a score of it."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import recipes
from kvjax.cache import LayerCache
from kvjax.decoding import prefill_chunk
from pallas_kernels import SCRATCH_PAGE
from tests.decoding import small
from tests.faults import cached
from tests.recipes.test_budget import made

RECIPES = {
    "uniform int4": recipes.uniform("int4", page_size=16),
    "kivi4": recipes.kivi("kivi4-g8", page_size=16, window=8),
    "h2o int4": made("h2o", codec="int4", budget=36),
    "rkv k4v2": made("rkv", codec="k4v2", budget=36),
}
QUICKLY = [n if n == "rkv k4v2" else pytest.param(n, marks=pytest.mark.slow) for n in RECIPES]
PROMPTS = small.prompts([70, 33, 21])


def read(recipe, prompts, bucket: int = 128, pieces: tuple[int, ...] = (128,)):
    """The cache after all prompts, read in pieces of at most so many tokens."""
    lm = small.lm()
    cache = cached.empty(lm, recipe, bucket, rows=len(prompts))
    logits = jnp.zeros((len(prompts), lm.config.vocab_size))
    start = 0
    for size in pieces:
        count = [min(max(len(prompt) - start, 0), size) for prompt in prompts]
        ids = np.full((len(prompts), bucket), 7, np.int32)
        for row, prompt in enumerate(prompts):
            ids[row, : count[row]] = prompt[start : start + count[row]]
        cache, logits = prefill_chunk(lm.model, cache, logits, ids, np.int32(count), recipe=recipe)
        start += size
    return cache


def coded(layer: LayerCache, row: int) -> dict[tuple[int, int], bytes]:
    """Codes and scales of a row's stored tokens, by head and position."""
    pool, table = layer.pools[1], np.asarray(layer.tables[1][row])
    pos, found = np.asarray(pool.pos), {}
    groups = {name: getattr(layer.codecs[1], name).tokens for name in ("k", "v")}
    for head, pages in enumerate(table):
        for page in pages[pages != SCRATCH_PAGE]:
            for slot in np.flatnonzero(pos[page] >= 0):
                parts = []
                for name, tokens in groups.items():
                    for kind, at in (
                        ("", slot),
                        ("_scale", slot // tokens),
                        ("_zero", slot // tokens),
                    ):
                        array = getattr(pool, name + kind)
                        if array is not None:
                            numbers = np.asarray(array[page])
                            parts.append(numbers[at] if name == "k" else numbers[:, at])
                found[head, int(pos[page, slot])] = b"".join(part.tobytes() for part in parts)
    return found


@pytest.mark.parametrize("name", QUICKLY)
def test_permuting_the_rows_of_a_batch_leaves_each_row_s_codes(name):
    """They are stored packed, as bytes, and are the same wherever their row is."""
    order = [2, 0, 1]
    first = read(RECIPES[name], PROMPTS)
    other = read(RECIPES[name], [PROMPTS[i] for i in order])
    for ours, theirs in zip(first.layers, other.layers, strict=True):
        assert ours.pools[1].k.dtype == ours.pools[1].v.dtype == jnp.uint8
        for now, before in enumerate(order):
            found = coded(theirs, now)
            assert found and found == coded(ours, before)


@pytest.mark.parametrize("name", RECIPES)
def test_a_row_s_codes_do_not_depend_on_padding_or_neighbours(name):
    """Alone in 128 places and among longer rows: 107 places of padding or none of its own."""
    together = read(RECIPES[name], PROMPTS)
    for row in (1, 2):
        alone = read(RECIPES[name], [PROMPTS[row]])
        for ours, theirs in zip(together.layers, alone.layers, strict=True):
            assert coded(ours, row) == coded(theirs, 0)


@pytest.mark.parametrize("spec", ["kivi4-g8", "int4"])
def test_tokens_that_come_one_by_one_are_coded_as_in_one_go_and_not_exactly(spec):
    """Groups are filled before they are coded: a group of one would be stored exactly, for the
    price of its scale. The first layer's tokens do not depend on what was coded before them."""
    method = recipes.kivi if spec.startswith("kivi") else recipes.uniform
    recipe, prompt = method(spec, page_size=16, window=8), [PROMPTS[0]]
    whole = read(recipe, prompt).layers[0]
    single = read(recipe, prompt, pieces=(33, *[1] * 37)).layers[0]
    assert coded(whole, 0) == coded(single, 0)
    exact = read(recipes.uniform("bf16", page_size=16, window=8), prompt).layers[0]
    k, v, _, pos = cached.plain(single)
    true_k, true_v, _, true_pos = cached.plain(exact)
    stored = {(h, p) for h, p in coded(single, 0)}
    heads = len(pos)
    for h in range(heads):
        at = {int(p): i for i, p in enumerate(pos[h]) if p >= 0}
        true_at = {int(p): i for i, p in enumerate(true_pos[h]) if p >= 0}
        assert at.keys() == true_at.keys()
        for ours, true in ((k, true_k), (v, true_v)):
            off = [np.abs(ours[h, at[p]] - true[h, true_at[p]]).max() for _, p in stored]
            assert np.mean(np.array(off) > 1e-4) > 0.9
    assert len(stored) >= heads * 56
