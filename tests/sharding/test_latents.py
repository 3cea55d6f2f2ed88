"""Latents on several devices: all have the same ones, and rebuild their own heads of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.compare import compare
from kvjax.compress.selectors import SnapKV
from kvjax.dynakv.cached import latents, rebuilt
from kvjax.dynakv.coder import Coder
from kvjax.dynakv.pca import spectra_of
from kvjax.dynakv.settings import SpectralSettings
from kvjax.sharding import groups, on, per_shard
from kvjax.thoughts import Given, Retention
from tests.decoding import small
from tests.dynakv.decoding import saved, spectra
from tests.dynakv.tiny import perturbed, tiny
from tests.sharding.test_decode import lm

slow = pytest.mark.slow
RECIPES = {
    "dynakv": {},
    "codes, little room": {"codec": "int8", "rate": 0.4},
    "snapkv": {"selector": SnapKV(window=16), "budget": 40, "every": 32},
    "thinkv": {
        "segmenter": Given("RTE", every=32),
        "retention": Retention(schedule=(8, 4)),
        "budget": 40,
        "codec": "bf16",
    },
}
LONG = small.prompts([40, 63, 33, 57, 48, 50], seed=5)


@pytest.fixture(scope="session")
def recipe_of(tmp_path_factory):
    """Recipes with an adapter of a golden model: gates that tell tokens apart, and means."""

    @functools.cache
    def adapter(model: str) -> str:
        ids = np.random.default_rng(9).integers(0, 95, (4, 32)).astype(np.int32)
        settings = SpectralSettings(tilt=0.0, centre="mean")
        found = spectra_of(small.lm(model).model, [(ids, np.ones(ids.shape, bool))], settings)
        folder = tmp_path_factory.mktemp("golden")
        return saved(folder, perturbed(found, gate=1.5), small.lm(model))

    def recipe(name: str, model: str = "llama") -> kvjax.recipes.Recipe:
        options = {"page_size": 8} | RECIPES[name]
        if name != "thinkv":
            return kvjax.recipes.dynakv(adapter(model), blocks=4, **options)
        projector = kvjax.recipes.dynakv(adapter(model), blocks=4).projector
        return kvjax.recipes.thinkv(projector=projector, **options)

    return recipe


def agree(spread: list[kvjax.Result], alone: list[kvjax.Result]) -> None:
    assert [result.tokens for result in spread] == [result.tokens for result in alone]
    for mine, own in zip(spread, alone, strict=True):
        for figure in ("crowded", "rates", "live_tokens", "evictions", "bits"):
            assert mine.report["kv"][figure] == own.report["kv"][figure], figure
        assert mine.report["kv"].get("thoughts") == own.report["kv"].get("thoughts")
        for name in ("codes", "metadata"):  # counted on each device
            held = mine.report["kv"]["bytes"][name] / mine.report["run"]["tp"]
            assert held == own.report["kv"]["bytes"][name]


def test_a_device_rebuilds_its_own_heads():
    """Out of latents that all devices have, to which each gives its own heads."""
    model = tiny("llama", 2)
    config, rng = model.config, np.random.default_rng(0)
    coder = Coder.of(spectra(centre="mean").layers[0], jnp.float32)
    shape = (2, 5, config.num_kv_heads, config.head_dim)
    k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2))
    pos = jnp.asarray(rng.integers(0, 99, shape[:2]), jnp.int32)

    def through(coder, asked, pos):  # named as what is spread by heads
        latent = latents(coder, *asked, jnp.float32)
        return {"asked": rebuilt(coder, latent, pos, config), "latent": latent}

    alone = through(coder, (k, v), pos)
    [group] = groups(lm(2))
    with on(group.mesh):
        spread = jax.jit(per_shard(through))(coder, (k, v), pos)
    for mine, own in zip(*map(jax.tree.leaves, (spread, alone)), strict=True):
        np.testing.assert_allclose(mine, own, rtol=1e-5, atol=1e-5)
    parts = [np.asarray(shard.data) for shard in spread["latent"].addressable_shards]
    assert len(parts) == 2 and (parts[0] == parts[1]).all()


@slow
@pytest.mark.parametrize(
    ("name", "model", "size"),
    [
        *((name, "llama", (2, 1)) for name in RECIPES),
        ("dynakv", "llama", (2, 2)),
        ("thinkv", "llama", (2, 2)),
        ("dynakv", "gpt_oss", (2, 1)),
        ("dynakv", "qwen3", (2, 1)),
    ],
)
def test_every_recipe(name, model, size, recipe_of):
    """Windows, sinks and normed keys too; rows that refill, and blocks that find no room."""
    how = {"recipe": recipe_of(name, model), "batch_size": 4, "repetition_stop": False}
    how["max_new_tokens"] = 112 if name == "thinkv" else 64
    alone, spread = (small.decode(LONG, m, **how) for m in (small.lm(model), lm(*size, model)))
    agree(spread, alone)
    assert any(own.report["kv"]["crowded"] for own in alone) == ("room" in name)
    evicts = name in ("snapkv", "thinkv") or model == "gpt_oss"  # whose windows move on
    assert any(own.report["kv"]["evictions"] for own in alone) == evicts


@slow
def test_logits(recipe_of):
    """Whole sequences, and a cache on every device, are left to the compiler."""
    ids, recipe = small.prompts([60], seed=3)[0], recipe_of("dynakv")
    found = [compare(m, ids, recipe=recipe, prompt_tokens=20) for m in (lm(2, 2), small.lm())]
    assert found[0].bytes == found[1].bytes and abs(found[0].kl_mean - found[1].kl_mean) < 1e-5


def test_copies_of_a_head_are_refused(recipe_of):
    with pytest.raises(kvjax.UsageError, match="tp 4 is more than the model's 2 KV heads, of whi"):
        small.tokens(small.prompts(), lm(4), recipe=recipe_of("dynakv"))
