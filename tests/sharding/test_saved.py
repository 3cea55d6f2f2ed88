"""Conversations that go on with other devices than they began with."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.cache import plan
from kvjax.decoding.conversation import Conversation
from kvjax.decoding.empty import empty_cache
from kvjax.sharding import groups, on, shards
from pallas_kernels import SCRATCH_PAGE
from tests.decoding import small
from tests.decoding.test_conversation import HOW, RECIPES, prompt_of, same
from tests.sharding.test_decode import lm
from tests.sharding.test_latents import recipe_of

__all__ = ["recipe_of"]
slow = pytest.mark.slow
SIZES = {"tp2": (2, 1), "tp4": (4, 1), "dp2 tp2": (2, 2)}
ROUNDED = ("_scale", "_zero")
TURN = small.prompts([21], seed=9)[0]


def decode(devices: str, prompt, recipe, new: int, **options) -> kvjax.Result:
    how = HOW | {"recipe": recipe, "max_new_tokens": new} | options
    return small.decode([prompt], model(devices), **how)[0]


def model(devices: str) -> kvjax.LanguageModel:
    return small.lm() if devices == "one" else lm(*SIZES[devices])


def alike(left: kvjax.Conversation, right: kvjax.Conversation) -> None:
    """They hold the same, but for sums that were added in another order.

    A little more may round a code to the next, with its scale, which later layers see.
    """
    assert left == right and left.row.keys() == right.row.keys()
    for name, array in left.row.items():
        other = right.row[name]
        assert array.shape == other.shape and array.dtype == other.dtype, name
        if (array.dtype == np.uint8 and name.endswith((".k", ".v"))) or name.endswith(ROUNDED):
            continue
        atol = 5e-3 if array.dtype.kind == "f" else 0
        np.testing.assert_allclose(array, other, rtol=0, atol=atol, err_msg=name)


def saved_and_loaded(kept: kvjax.Conversation, devices: str, path) -> kvjax.Conversation:
    kvjax.save_cache(kept, path)
    return kvjax.load_cache(model(devices), path, recipe=kept.recipe)


@pytest.mark.parametrize("devices", ["tp2", "tp4"])
def test_a_row_is_put_on_devices_and_taken_back(devices):
    """Bit by bit; each device has its own heads' pages, and knows which are free."""
    recipe = RECIPES["uniform"]
    kept = decode("one", prompt_of(recipe), recipe, 17).cache
    [lm] = groups(model(devices))
    with on(lm.mesh):
        size = {"batch_size": 1, "prompt_tokens": 40, "max_new_tokens": 17, "parameter_bytes": 0}
        planned = plan(lm.config, recipe, dtype=lm.dtype, tp=shards(lm.mesh), **size)
        cache = kept.state(lm, empty_cache(lm, planned.geometry)).cache
    same(Conversation.of(lm, cache, recipe, kept.tokens, kept.answered), kept)
    for number, layer in enumerate(cache.layers):
        for index, (pool, table, free) in enumerate(
            zip(layer.pools, layer.tables, layer.free, strict=True)
        ):
            pages_of, k = (kept.row[f"{number}.{index}.{name}"] for name in ("pages", "k"))
            mine = (pool.pos, free.pages, free.count)
            parts = zip(*(array.addressable_shards for array in mine), strict=True)
            for head, (pos, pages, count) in enumerate(parts):
                own = np.asarray(table)[0, head]
                own = own[own != SCRATCH_PAGE].tolist()
                left = np.asarray(pages.data)[: int(count.data[0])].tolist()
                assert own and sorted(own + left) == list(range(1, len(pos.data)))
                held = np.asarray(pool.k.addressable_shards[head].data)[own[0]]
                assert (held == k[pages_of[: head // lm.copies].sum()]).all()


@slow
def test_an_answer_goes_on_elsewhere(recipe_of, tmp_path):
    """Of latents, on one device after two: as if it had been one all the time."""
    recipe, prompt = recipe_of("dynakv"), small.prompts()[0]
    first = decode("tp2", prompt, recipe, 9)
    on = decode("one", [], recipe, 8, cache=saved_and_loaded(first.cache, "one", tmp_path / "a"))
    whole = decode("one", prompt, recipe, 17)
    assert first.tokens + on.tokens == whole.tokens
    alike(on.cache, whole.cache)


@slow
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("full", "dp2 tp2", "one"),
        ("full", "one", "tp4"),
        ("full", "tp4", "tp2"),
        ("kivi", "tp2", "tp4"),
        ("streaming", "tp4", "one"),
        ("h2o", "one", "tp2"),
        ("rkv", "tp2", "dp2 tp2"),
        ("thinkv", "tp2", "one"),
        ("thinkv", "one", "tp2"),
        ("latents dynakv", "one", "tp2"),
        ("latents thinkv", "dp2 tp2", "one"),
    ],
)
def test_what_is_saved_goes_on_elsewhere(name, before, after, recipe_of, tmp_path):
    """An answer, its next turn, and an earlier place of it."""
    latent = name.startswith("latents ")
    recipe = recipe_of(name.removeprefix("latents ")) if latent else RECIPES[name]
    prompt, path = prompt_of(recipe), tmp_path / "cache"

    def turns(first: str, second: str) -> list[kvjax.Result]:
        found = [decode(first, prompt, recipe, 37)]
        for more in ([], TURN):
            cache = saved_and_loaded(found[-1].cache, second, path)
            found.append(decode(second, more, recipe, 27, cache=cache))
        return found

    alone, spread = turns("one", "one"), turns(before, after)
    for mine, own in zip(spread, alone, strict=True):
        assert mine.tokens == own.tokens
        alike(mine.cache, own.cache)
    last = spread[-1].cache
    if name not in ("h2o", "rkv"):
        earlier = kvjax.rewind(model(after), last, len(last.tokens) - 2)
        assert decode(after, [], recipe, 2, cache=earlier).tokens == last.tokens[-2:]


@slow
@pytest.mark.parametrize("name", ["full", "tova"])
def test_a_row_that_the_host_has_ended(name, text_lm):
    """Where the devices are ahead of a stop text; one recipe has to read the answer again."""
    recipe = RECIPES[name]
    one, two = (dataclasses.replace(m, tokenizer=text_lm.tokenizer) for m in (small.lm(), lm(2)))
    how = HOW | {"recipe": recipe, "max_new_tokens": 40}
    whole = small.decode([prompt_of(recipe)], one, **how)[0]
    how["stop_texts"] = (text_lm.tokenizer.decode(whole.tokens[20:22]),)
    alone, spread = (small.decode([prompt_of(recipe)], m, **how)[0] for m in (one, two))
    assert alone.tokens == spread.tokens and len(alone.tokens) < 40
    alike(spread.cache, alone.cache)
