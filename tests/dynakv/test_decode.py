"""Decoding with latents against the model that masks keys and values in whole sequences."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache import held_latents
from kvjax.decoding import report
from kvjax.decoding.empty import empty_cache
from kvjax.decoding.report import BytesLog
from kvjax.dynakv import cached
from kvjax.dynakv.adapter import Adapter, save_adapter
from kvjax.errors import UsageError
from pallas_kernels import SCRATCH_PAGE
from pallas_kernels.read import plain_keys
from tests.dynakv.decoding import (
    BLOCK,
    BLOCKS,
    OPTIONS,
    PAGE,
    PROMPTS,
    TOTAL,
    forced,
    planned,
    saved,
    spectra,
)
from tests.dynakv.tiny import WIDTH, fitted, perturbed, run, tiny, tokens, with_settings


def masked(lm, found, ids, block: int = BLOCK):
    """Logits and hard rates of the whole sequences, ranks rounded up to whole blocks."""
    logits, (_, hard) = run(lm.model, with_settings(found, rank_multiple=block), ids)
    return np.asarray(logits), np.asarray(hard)


def agree(found: np.ndarray, wanted: np.ndarray, tolerance: float = 1e-4) -> None:
    there = ~np.isnan(found).any(-1)
    assert there.sum() == sum(TOTAL - prompt + 1 for prompt in PROMPTS)
    np.testing.assert_allclose(found[there], wanted[there], atol=tolerance, rtol=tolerance)


def test_step_by_step_and_in_pieces_equals_the_mask(plain):
    """What lies in pages, packed to whole blocks, is what the mask leaves of whole sequences."""
    wanted, hard = masked(plain.lm, plain.spectra, plain.ids)
    agree(plain.logits, wanted)
    assert len(np.unique(hard)) == BLOCKS
    assert not np.asarray(plain.cache.crowded).any()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("qwen3", {"centre": "mean", "stored": "masked"}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"inverse": "orthogonal"}, marks=pytest.mark.slow),
        pytest.param("qwen2", {"gate": "layer", "inverse": "free"}, marks=pytest.mark.slow),
        pytest.param("llama", {"tau": 0.5, "centre": "moment"}, marks=pytest.mark.slow),
    ],
)
def test_other_families_and_settings_equal_the_mask(family, settings, tmp_path):
    layers = 2 if family == "gpt_oss" else 1  # one with a window, one without
    lm, found = tiny(family, layers), spectra(family, layers, **settings)
    ids = tokens(lm, (2, TOTAL))
    width = lm.config.num_kv_heads * lm.config.head_dim
    recipe = kvjax.recipes.dynakv(saved(tmp_path, found, lm), **OPTIONS)
    logits, _ = forced(lm, recipe, ids)
    agree(logits, masked(lm, found, ids, width // BLOCKS)[0])


@pytest.mark.parametrize(
    ("family", "blocks"), [pytest.param("qwen3", 1, marks=pytest.mark.slow), ("llama", WIDTH)]
)
def test_full_rank_in_any_basis_is_the_model(family, blocks, tmp_path):
    """Also where blocks are as narrow as can be, and with keys that are normed."""
    lm = tiny(family, 1)
    width = lm.config.num_kv_heads * lm.config.head_dim
    full = {"gate": "fixed", "key_rank": width, "value_rank": width}
    found = perturbed(fitted(lm, centre="mean", **full))
    recipe = kvjax.recipes.dynakv(saved(tmp_path, found, lm), blocks=blocks, page_size=PAGE)
    ids = tokens(lm, (2, TOTAL), seed=1)
    logits, _ = forced(lm, recipe, ids)
    agree(logits, np.asarray(kvjax.forward(lm, ids)))


def test_the_blocks_that_are_held_are_those_of_the_ranks(plain):
    """Counted in the pages: every token's blocks, and the bytes that they come to."""
    lm, recipe, cache = plain.lm, plain.recipe, plain.cache
    _, hard = masked(lm, plain.spectra, plain.ids)
    stored = np.asarray(cache.stored)
    counts = np.asarray(held_latents(cache))
    for row, count in enumerate(stored):
        assert counts[row, :, 0].tolist() == [TOTAL] * 2
        assert counts[row, :, 1].tolist() == [count] * 2
        ranks = np.rint(hard[:, :, row, :count] * WIDTH).astype(int)
        np.testing.assert_array_equal(counts[row, :, 2:], ranks.sum(-1))
        for layer, by_side in zip(cache.layers, ranks, strict=True):
            pool, table = layer.pools[1], layer.tables[1][row]
            for line in range(2 * BLOCKS):
                held = np.asarray(pool.pos[table[line]]).ravel()
                beyond = np.flatnonzero(by_side[line % 2] > line // 2 * BLOCK)
                assert sorted(held[held >= 0].tolist()) == beyond.tolist()
                pages = int((table[line] != SCRATCH_PAGE).sum())
                assert pages == -(-len(beyond) // PAGE)
    geometry = planned(lm, recipe).geometry
    assert cache.nbytes() == geometry.nbytes == sum(cache.usage().values())
    slot = geometry.slot_bytes(geometry.layers[0].classes[1])
    assert slot == {"codes": 4.0 * BLOCK, "scales": 0.0, "metadata": 4.0}


def test_what_is_kept_of_a_token_does_not_depend_on_its_position(plain):
    """Keys are stored before their rotation, to the bit."""
    lm, recipe = plain.lm, plain.recipe
    layer, module = plain.cache.layers[0], lm.model.layers[0]
    x = lm.model.embed[...][tokens(lm, (1, 9))]
    seen = []

    def attend(q, k, v, sinks):
        seen.append(cached.latents(layer.coder, k, v, q.dtype))
        return q, None

    half = lm.config.head_dim // 2
    for shift in (0.0, 1.0):
        turn = jnp.cos(jnp.full((1, 9, half), shift)), jnp.sin(jnp.full((1, 9, half), shift))
        module(x, turn, attend, recipe.key_stage)
    np.testing.assert_array_equal(*seen)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_codes_of_latents(codec, plain):
    """Every block of a token has a scale of its own; fewer bits are further from none."""
    lm, recipe = plain.lm, dataclasses.replace(plain.recipe, codec=codec)
    logits, cache = forced(lm, recipe, plain.ids)
    there = ~np.isnan(plain.logits)
    off = np.abs(logits - plain.logits)[there].mean() / np.abs(plain.logits[there]).mean()
    assert {"int8": 1e-5, "int4": 1e-3}[codec] < off < {"int8": 0.02, "int4": 0.3}[codec]
    coded, numbers = (layer.layers[0].pools[1] for layer in (cache, plain.cache))
    # Layer 0 sees the same tokens whatever is coded, and puts them into the same slots.
    np.testing.assert_array_equal(coded.pos, numbers.pos)
    pages = jnp.arange(len(coded.pos), dtype=jnp.int32)[None, None]
    x, y = (np.asarray(plain_keys(pool, pages, jnp.float32))[0, 0] for pool in (coded, numbers))
    live = np.asarray(coded.pos) >= 0
    step = np.asarray(coded.k_scale, np.float32)[live]
    largest = np.abs(y[live]).max(-1, keepdims=True)
    assert np.all(np.abs(x[live] - y[live]) <= np.maximum(step, 0.3 * largest))
    geometry = planned(lm, recipe).geometry
    slot = geometry.slot_bytes(geometry.layers[0].classes[1])
    assert slot["codes"] == {"int8": BLOCK, "int4": BLOCK / 2}[codec] and slot["scales"] == 2.0


@pytest.mark.slow
def test_a_row_that_needs_more_than_its_room_keeps_every_first_block(tmp_path):
    """What finds no slot is counted, and another row is not touched by it."""
    lm, found = tiny("llama", 1), spectra(layers=1)
    ids = tokens(lm, (2, TOTAL), seed=4)
    recipe = kvjax.recipes.dynakv(saved(tmp_path, found, lm), rate=0.4, **OPTIONS)
    together, cache = forced(lm, recipe, ids)
    assert np.asarray(cache.crowded).all()
    counts = np.asarray(held_latents(cache))
    assert (counts[:, :, 0] == TOTAL).all() and (counts[:, :, 1] == cache.stored[:, None]).all()
    room = [layer.classes[1].pages_per_row for layer in planned(lm, recipe).geometry.layers]
    for layer, most in zip(cache.layers, room, strict=True):
        owned = np.asarray((layer.tables[1] != SCRATCH_PAGE).sum((1, 2)))
        assert (owned <= most).all()
    for row in (0, 1):
        beside = ids.copy()
        beside[1 - row] = 5
        again, _ = forced(lm, recipe, beside)
        np.testing.assert_array_equal(again[row], together[row])


def test_an_adapter_leaves_the_device_when_the_cache_has_its_matrices(tmp_path):
    lm, found = tiny("llama", 2), spectra()
    recipe = kvjax.recipes.dynakv(saved(tmp_path, found, lm), **OPTIONS)
    geometry = planned(lm, recipe).geometry
    before = {id(array) for array in jax.live_arrays()}
    cache = empty_cache(lm, geometry)
    left = sum(array.nbytes for array in jax.live_arrays() if id(array) not in before)
    assert left == cache.nbytes() == geometry.nbytes


def test_room_is_made_for_what_was_measured(tmp_path):
    lm, found = tiny("llama", 2), spectra()
    rates = [[0.4, 0.2], [0.9, 0.1]]
    folder = saved(tmp_path, found, lm, rate_by_layer=rates)
    recipe = kvjax.recipes.dynakv(folder, **OPTIONS)
    assert recipe.projector.rates == ((0.65625, 0.40625), (1.0, 0.28125))
    assert [recipe.projector.deep_blocks(layer) for layer in (0, 1)] == [2.25, 3.125]
    again = kvjax.recipes.dynakv(folder, tau=0.3, **OPTIONS)
    assert again.projector.rates == recipe.projector.rates
    assert kvjax.recipes.dynakv(folder, tau=0.05, **OPTIONS).projector.rates == ((1.0, 1.0),)
    assert kvjax.recipes.dynakv(folder, rate=0.3, **OPTIONS).projector.rates == ((0.3, 0.3),)
    pages = -(-planned(lm, recipe).tokens // PAGE)
    shapes = [layer.classes[1] for layer in planned(lm, recipe).geometry.layers]
    assert [shape.pages_per_head for shape in shapes] == [pages] * 2
    count = planned(lm, recipe).tokens
    wanted = [2 * pages + math.ceil(deep * count / PAGE) + 6 for deep in (2.25, 3.125)]
    assert [shape.pages_per_row for shape in shapes] == wanted


def test_a_fixed_rank_has_room_for_itself(tmp_path):
    lm = tiny("llama", 1)
    found = fitted(lm, gate="fixed", key_rank=BLOCK + 1, value_rank=2)
    folder = saved(tmp_path, found, lm, rate_by_layer=[[(BLOCK + 1) / WIDTH, 2 / WIDTH]])
    recipe = kvjax.recipes.dynakv(folder, **OPTIONS)
    assert recipe.projector.rates == ((0.5, 0.25),)
    assert recipe.projector.deep_blocks(0) == 1.0


def test_answers_and_what_is_reported_of_them(plain):
    """Greedy answers are those of the mask; bytes and rates are of the pages that are owned."""
    lm, found, recipe = plain.lm, plain.spectra, plain.recipe
    prompts = [row[:n].tolist() for row, n in zip(tokens(lm, (2, 50), 5), (50, 37), strict=True)]
    results = kvjax.generate(
        lm, prompts, recipe=recipe, max_new_tokens=30, stop_ids=(), repetition_stop=False
    )
    for prompt, result in zip(prompts, results, strict=True):
        whole = np.asarray([prompt + list(result.tokens)], np.int32)
        padded = np.pad(whole, ((0, 0), (0, TOTAL - whole.shape[1])))
        logits, hard = masked(lm, found, padded)
        chosen = logits[0, len(prompt) - 1 : whole.shape[1] - 1].argmax(-1)
        assert result.tokens == tuple(chosen.tolist())
        kv = result.report["kv"]
        read = whole.shape[1] - 1
        assert kv["live_tokens"]["end"] == kv["logical_tokens"] == read
        assert kv["evictions"] == kv["crowded"] == 0 and kv["bits"] == 32
        layer = kv["per_layer"][1]
        near = hard[1, :, 0, : read - recipe.window - recipe.tick].mean(-1)
        assert abs(layer["rate_keys"] - near[0]) < 0.1 and abs(layer["rate_values"] - near[1]) < 0.1
        rates = kv["rates"]
        each = [(x["rate_keys"], x["rate_values"]) for x in kv["per_layer"]]
        np.testing.assert_allclose((rates["keys"], rates["values"]), np.mean(each, 0))
        assert rates["hard"] == (rates["keys"] + rates["values"]) / 2
        assert kv["bytes"]["total_live"] < kv["bytes"]["pool_allocated"]
        each = kv["per_token"]
        left = len(each["keys"])
        assert each["tokens_each"] == 1 and left >= read - recipe.window - recipe.tick
        for side, name in enumerate(("keys", "values")):
            exact = hard[:, side, 0, :left].mean(0)
            np.testing.assert_allclose(each[name], exact, atol=1e-4)
            np.testing.assert_allclose(np.mean(each[name]), rates[name], atol=1e-4)


def test_tokens_that_are_gone_and_rows_that_are_long(plain, monkeypatch):
    """Nothing is said of a token that no layer holds; neighbours are taken together."""
    shape = planned(plain.lm, plain.recipe).geometry
    blocks = np.zeros((1, 3, 9), np.int32)
    blocks[0, :, [0, 1, 3, 4, 6]] = [[2, 3, 8], [2, 2, 2], [1, 4, 1], [2, 8, 8], [1, 1, 1]]
    found = _of_tokens(shape, blocks)
    assert found == {
        "tokens_each": 1,
        "keys": [0.375, 0.25, None, 1.0, 1.0, None, 0.25],
        "values": [1.0, 0.25, None, 0.25, 1.0, None, 0.25],
    }
    monkeypatch.setattr(report, "MOST_TOKENS", 4)
    found = _of_tokens(shape, blocks)
    assert (found["tokens_each"], found["keys"]) == (2, [0.3125, 1.0, 1.0, 0.25])
    assert _of_tokens(shape, blocks[..., 7:])["keys"] == []


def _of_tokens(shape, blocks):
    log = BytesLog(shape)
    log.add(
        0,
        length=np.array([9]),
        slots=np.zeros((1, 2, 2), np.int32),
        pages=np.zeros((1, 2, 2), np.int32),
        crowded=np.zeros(1, np.int32),
        latents=np.zeros((1, 2, 4), np.int32),
        blocks=blocks,
    )
    return log.as_dict()["per_token"]


def test_another_models_adapter_is_refused(tmp_path):
    lm = tiny("llama", 2)
    recipe = kvjax.recipes.dynakv(saved(tmp_path, spectra(), lm), **OPTIONS)
    with pytest.raises(UsageError, match=r"^adapter: .*trained for tiny llama .*and not for"):
        kvjax.generate(tiny("llama", 1), [[1, 2]], recipe=recipe)


def test_an_adapter_that_changes_is_refused(tmp_path):
    lm = tiny("llama", 2)
    recipe = kvjax.recipes.dynakv(saved(tmp_path, spectra(), lm), **OPTIONS)
    saved(tmp_path, spectra(tau=0.2, centre="mean"), lm)
    with pytest.raises(UsageError, match=r"^adapter: .*has changed since"):
        kvjax.generate(lm, [[1, 2]], recipe=recipe)


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({}, {"tau": 1.0}, "tau must be from 0 to below 1, got 1.0"),
        ({}, {"rate": 0.0}, "rate must be a share above 0 and at most 1, got 0.0"),
        ({}, {"blocks": 0}, "blocks must be a whole number above 0, got 0"),
        ({}, {"codec": "kivi2"}, "codec kivi2 is not for latents"),
        ({}, {"codec": "k4v2"}, "codec k4v2 is not for latents"),
        ({}, {"prompt_codec": "int8"}, "prompt_codec has no effect on latents"),
        ({"masks_own": False}, {}, r"adapter: .*--no-masks-own"),
    ],
)
def test_what_cannot_be_decoded_with_is_refused(settings, options, message, tmp_path):
    lm = tiny("llama", 2)
    folder = saved(tmp_path, with_settings(spectra(), **settings), lm)
    with pytest.raises(UsageError, match=message):
        kvjax.recipes.dynakv(folder, **options)


@pytest.mark.parametrize(
    ("family", "settings", "options", "message"),
    [
        ("llama", {}, {"blocks": 5}, "blocks must divide the 16 components .*got 5: 8 would do"),
        ("llama", {}, {"blocks": 16, "codec": "int4"}, "4-bit codes, got 16: 8 would do"),
        ("qwen3", {"keys": "raw"}, {}, "adapter: .*--keys raw"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(family, settings, options, message, tmp_path):
    lm = tiny(family, 2)
    folder = saved(tmp_path, with_settings(spectra(family), **settings), lm)
    with pytest.raises(UsageError, match=message):
        planned(lm, kvjax.recipes.dynakv(folder, **options))


def test_a_model_that_was_trained_as_well_is_refused(tmp_path):
    lm = tiny("llama", 2)
    whole = Adapter(spectra(), lm.fingerprint, lm.source, {}, {}, decoder=lm.model)
    save_adapter(whole, tmp_path)
    with pytest.raises(UsageError, match=r"adapter: .*--trains all"):
        kvjax.recipes.dynakv(tmp_path)


@pytest.mark.parametrize(
    "rates",
    [
        0.5,
        [],
        {"0": [0.5, 0.5]},
        [[0.5, 0.5]],
        [[0.5, 0.5]] * 3,
        [[0.5, 0.5], 0.5],
        [[0.5, 0.5], [0.5]],
        [[0.5, 0.5], [0.5, "0.5"]],
        [[0.5, 0.5], [0.5, None]],
        [[0.5, 0.5], [0.5, True]],
        [[0.5, 0.5], [0.5, math.nan]],
        [[0.5, 0.5], [0.5, 1.01]],
        [[0.5, 0.5], [-0.01, 0.5]],
    ],
)
def test_damaged_rates_are_refused(rates, tmp_path):
    folder = saved(tmp_path, spectra(), tiny("llama", 2), rate_by_layer=rates)
    with pytest.raises(UsageError, match=r"^adapter: .*rate_by_layer must .* 2 layers") as error:
        kvjax.recipes.dynakv(folder)
    assert folder in str(error.value)


def test_no_adapter_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"adapter: .*cannot read adapter.json"):
        kvjax.recipes.dynakv(tmp_path / "none")
