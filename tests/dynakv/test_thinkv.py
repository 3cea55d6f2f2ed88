"""ThinKV's eviction among latents: what stays of a segment, in all heads and blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache import held_latents
from kvjax.dynakv.forward import through
from kvjax.errors import UsageError
from kvjax.models.rope import rotate, rotation
from kvjax.thoughts import Given, Retention
from kvjax.thoughts.pages import last_sparsity
from kvjax.thoughts.retention import survivals
from kvjax.thoughts.sparsity import dense_sparsity
from tests.dynakv.decoding import BLOCK, BLOCKS, PAGE, PROMPTS, forced
from tests.dynakv.tiny import tokens, with_settings

EVERY, TOTAL = 32, 180
RETENTION = Retention(schedule=(8, 4))


def thinkv(plain, **options) -> kvjax.recipes.Recipe:
    own = {"segmenter": Given("RT", every=EVERY), "retention": RETENTION, "budget": 40}
    own |= {"projector": plain.recipe.projector, "codec": "bf16", "page_size": PAGE}
    return kvjax.recipes.thinkv(**own | options)


def stored_keys(plain, ids) -> jax.Array:
    """Layer 0's keys as they are stored, which depend on their own tokens alone."""
    found = []
    blocked = with_settings(plain.spectra, rank_multiple=BLOCK)
    spectrum, (basis, _) = blocked.layers[0].keys, blocked.layers[0].bases()
    config, pos = plain.lm.config, jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    angles = rotation(jnp.broadcast_to(pos, ids.shape), config.rope, config.head_dim)

    def attend(q, k, v, sinks):
        found.append(rotate(through(spectrum, basis, k, "hard")[0], *angles))
        return q, None

    plain.lm.model.layers[0](plain.lm.model.embed[...][ids], angles, attend, "normed")
    return found[0]


@pytest.mark.slow
def test_what_stays_of_a_segment_is_one_set_for_all_heads(plain):
    recipe, ids = thinkv(plain), tokens(plain.lm, (2, TOTAL), seed=6)
    roomy = dataclasses.replace(plain.lm.config, context_length=256)
    logits, cache = forced(dataclasses.replace(plain.lm, config=roomy), recipe, ids)
    keys = stored_keys(plain, ids)
    levels = np.asarray(cache.thoughts.level)
    assert levels.max() == 2 and (levels[:, 0] > 0).all()
    for row, prompt in enumerate(PROMPTS):
        stored, expected = int(cache.stored[row]), set(range(prompt))
        for segment, start in enumerate(range(prompt, stored, EVERY)):
            pos = np.arange(start, start + EVERY)
            if pos[-1] >= stored:
                expected |= set(range(start, stored))
                continue
            own = keys[row : row + 1, start : start + EVERY].swapaxes(1, 2)
            shared = dataclasses.replace(RETENTION, shared=True)
            survive = survivals(
                shared, own, None, jnp.asarray(pos[None], jnp.int32), jnp.int32(0), jnp.int32(0)
            )
            alive = np.asarray(survive)[0, 0] >= levels[row, segment]
            assert alive.sum() == RETENTION.sizes(EVERY)[levels[row, segment]]
            expected |= set(pos[alive].tolist())
        pool, table = cache.layers[0].pools[1], cache.layers[0].tables[1][row]
        held = [set(np.asarray(pool.pos[line]).ravel().tolist()) - {-1} for line in table]
        assert held[0] == held[1] == expected
        assert all(more <= expected for more in held[2:])
    assert np.isfinite(logits[1, PROMPTS[1] - 1 :]).all()
    counts = np.asarray(held_latents(cache))
    assert (counts[:, 0, 0] < TOTAL - EVERY).all()


@pytest.mark.slow
def test_sparsity_is_that_of_the_rebuilt_keys(plain):
    """Of all tokens, recent ones among them."""
    cache, lm = plain.cache, plain.lm
    layer, config = cache.layers[0], lm.config
    q = np.random.default_rng(0).standard_normal((2, 1, config.num_heads, config.head_dim))
    layer = dataclasses.replace(layer, queries=jnp.asarray(3 * q, jnp.float32))
    found = last_sparsity(layer, config.scale, cache.length, True, config)
    keys = stored_keys(plain, plain.ids)
    mask = jnp.ones(keys.shape[:2], bool)[:, None]
    wanted = dense_sparsity(layer.queries, keys, mask, config.scale)[:, 0]
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert 0 < float(wanted.max()) < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"thought_codecs": ("int4", "int4", "int2")}, "thought_codecs have no effect on latents"),
        ({"retention": Retention(forget=False)}, "forget has no effect on latents"),
        ({"prompt_codec": "int8"}, "prompt_codec has no effect on latents"),
    ],
)
def test_what_has_no_effect_is_refused(plain, options, message):
    with pytest.raises(UsageError, match=message):
        thinkv(plain, **options)


def test_texts_are_read(plain):
    folder = plain.recipe.projector.folder
    found = kvjax.recipes.parse("thinkv", adapter=folder, blocks=BLOCKS, codec="4", kinds="RT")
    assert found.projector == plain.recipe.projector and found.codec == "int4"
    assert found.thought_codecs is None and found.page_size == 16
    with pytest.raises(UsageError, match="codec must be one for all thoughts"):
        kvjax.recipes.parse("thinkv", adapter=folder, codec="R:4,E:4,T:2")
    with pytest.raises(UsageError, match="tau has no effect without an adapter"):
        kvjax.recipes.parse("thinkv", tau=0.2)
