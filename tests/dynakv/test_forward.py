"""A model that reads compressed keys and values: exact where nothing is lost, and as the switches
say where something is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.dynakv.forward import plain_states, read, through
from kvjax.dynakv.settings import SpectralSettings
from kvjax.dynakv.spectrum import Spectrum
from tests.dynakv.tiny import WIDTH, fitted, perturbed, run, tiny, tokens, with_settings
from tests.models import goldens


def relative(actual, expected) -> float:
    return goldens.relative_error(actual, np.asarray(expected))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("qwen3", {"keys": "normed"}),
        pytest.param("qwen3", {"keys": "raw", "centre": "mean"}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"masks_own": False}, marks=pytest.mark.slow),
    ],
)
def test_all_components_give_the_base_model(name, settings):
    lm = tiny(name)
    width = lm.config.num_kv_heads * lm.config.head_dim
    ids = jnp.asarray(tokens(lm, (2, 16)))
    spectra = fitted(lm, gate="fixed", key_rank=width, value_rank=width, **settings)
    expected = kvjax.forward(lm, ids)
    for moved in (spectra, perturbed(spectra, 0.05)):
        logits, (soft, hard) = run(lm.model, moved, ids)
        assert relative(logits, expected) < 1e-4
        assert (soft == 1).all() and (hard == 1).all()


def test_the_transpose_would_not_do_once_a_basis_has_moved():
    lm = tiny()
    spectra = perturbed(fitted(lm, gate="fixed", key_rank=WIDTH, value_rank=WIDTH), 0.05)
    own = spectra.layers[0].keys
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2, 8)), jnp.float32)
    right, _, _ = through(own, own.basis(), x, "hard")
    wrong, _, _ = through(own, (own.u[...], own.u[...].T), x, "hard")
    assert relative(right, x) < 1e-5 < 0.05 < relative(wrong, x)


def test_plain_states_are_the_models_own():
    lm = goldens.load("qwen2_window")
    golden = goldens.values("qwen2_window")
    hidden = jax.jit(plain_states)(lm.model, jnp.asarray(golden["prompt"])[None])
    assert relative(lm.model.logits(hidden)[0], golden["logits"]) < 1e-4


def test_positions_are_in_nothing_that_is_stored():
    lm = tiny("qwen3")
    ids = jnp.asarray(tokens(lm, (2, 16)))

    spectra = perturbed(fitted(lm), 0.05)

    @jax.jit
    def stored(spectra, first):
        own = spectra.layers[0].keys

        def attend(index, module, angles, beside, q, k, v, sinks):
            latent = own.latent(k.reshape(*k.shape[:2], -1), own.basis())
            return q, own.stored(latent, own.mask(latent))

        notes = read(lm.model, ids, attend, (None,), keys="normed", first_position=first)[1]
        return notes[0]

    np.testing.assert_array_equal(stored(spectra, 0), stored(spectra, 37))
    near, _ = run(lm.model, spectra, ids, mode="hard")
    far, _ = run(lm.model, spectra, ids, mode="hard", first_position=37)
    assert relative(far, near) < 1e-4


def test_each_token_sees_what_is_left_of_the_others_and_of_itself():
    lm = tiny()
    spectra = fitted(lm, gate="fixed", key_rank=4, value_rank=4)
    ids = jnp.asarray(tokens(lm, (2, 16)))
    exact = kvjax.forward(lm, ids)[0]
    masked = run(lm.model, spectra, ids)[0][0, 0]
    itself = run(lm.model, with_settings(spectra, masks_own=False), ids)[0][0]
    assert relative(masked, exact[0]) > 1e-2  # a first token sees but itself
    assert relative(itself[0], exact[0]) < 1e-5
    assert relative(itself[1:], exact[1:]) > 1e-2


def test_the_hard_rate_is_what_is_stored():
    lm = tiny()
    spectra = perturbed(fitted(lm, tilt=2.0))
    ids = jnp.asarray(tokens(lm, (2, 16)))
    _, (soft, hard) = run(lm.model, spectra, ids, mode="hard")
    assert soft.shape == hard.shape == (1, 2, 2, 16)
    assert len(np.unique(hard)) > 5  # a rank of its own for every token
    own = spectra.layers[0].values
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 40, WIDTH)), jnp.float32)
    latent = own.latent(x, own.basis())
    stored = own.stored(latent, own.mask(latent))
    _, _, rate = through(own, own.basis(), x.reshape(1, 40, 2, 8), "hard")
    np.testing.assert_array_equal((np.asarray(stored) != 0).sum(-1), np.asarray(rate) * WIDTH)


def test_masked_storage_is_the_soft_value_of_what_is_kept():
    lm = tiny()
    own = perturbed(fitted(lm, tilt=2.0)).layers[0].keys
    own.settings = SpectralSettings(tilt=2.0, stored="masked")
    latent = jnp.asarray(np.random.default_rng(0).standard_normal((1, 9, WIDTH)), jnp.float32)
    mask = own.mask(latent)
    stored = own.stored(latent, mask)
    np.testing.assert_array_equal(stored, np.where(mask > 0.1, latent * mask, 0))
    own.settings = SpectralSettings(tilt=2.0)
    np.testing.assert_array_equal(own.stored(latent, mask), np.where(mask > 0.1, latent, 0))


def test_ranks_by_layer_are_the_same_for_every_token():
    lm = tiny()
    spectra = perturbed(fitted(lm, gate="layer", tilt=2.0))
    _, (_, hard) = run(lm.model, spectra, jnp.asarray(tokens(lm, (2, 16))))
    assert (hard == hard[..., :1, :1]).all()


@pytest.mark.parametrize("tilt", [0.0, 20.0])
def test_the_first_rates_are_those_of_a_rising_bias(tilt):
    width = 128
    one = Spectrum(
        jnp.eye(width), jnp.zeros(width), SpectralSettings(gate="layer", tilt=tilt), None
    )
    mask = one.mask(jnp.zeros((1, 1, width)))
    expected = {0.0: (width + 1) / (2 * width), 20.0: 0.95}[tilt]
    assert abs(float(mask.mean()) - expected) < 0.005
    if not tilt:
        assert abs(float(one.ranks(mask)[0, 0]) / width - 0.9) < 0.01


def test_an_orthogonal_basis_stays_so():
    lm = tiny()
    spectra = perturbed(fitted(lm, inverse="orthogonal"), 0.0)
    own = spectra.layers[0].keys
    start = own.basis()[0]
    np.testing.assert_allclose(start, own.u[...], atol=1e-6)
    own.turn.set_value(jnp.asarray(np.random.default_rng(0).standard_normal((WIDTH, WIDTH)), "f4"))
    u, inverse = own.basis()
    np.testing.assert_allclose(u @ inverse, np.eye(WIDTH), atol=1e-5)
    assert np.abs(u - start).max() > 0.1


def test_a_free_inverse_starts_as_the_inverse_and_goes_its_own_way():
    own = fitted(tiny(), inverse="free").layers[0].values
    u, inverse = own.basis()
    np.testing.assert_allclose(u @ inverse, np.eye(WIDTH), atol=1e-5)
    own.u.set_value(2 * own.u[...])
    np.testing.assert_array_equal(own.basis()[1], inverse)


@pytest.mark.parametrize("learns", [True, False])
def test_gradients_reach_a_basis_through_its_inverse_and_its_gate(learns):
    spectra = perturbed(fitted(tiny(), tilt=2.0, basis_learns_from_gate=learns), 0.05)
    own = spectra.layers[0].keys
    graph, basis, rest = nnx.split(own, lambda path, _: path[-1] == "u", ...)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, 2, 8)), jnp.float32)

    @jax.jit
    def loss(u):
        own = nnx.merge(graph, jax.tree.map(lambda _: u, basis), rest)
        rebuilt, soft, _ = through(own, own.basis(), x, "soft")
        return jnp.square(rebuilt - x).mean() + soft.mean()

    u = own.u[...]
    direction = np.random.default_rng(1).standard_normal(u.shape).astype(np.float32)
    step = 2e-3
    slope = (loss(u + step * direction) - loss(u - step * direction)) / (2 * step)
    gradient = float((jax.grad(loss)(u) * direction).sum())
    assert (abs(gradient - float(slope)) < 0.01 * abs(float(slope))) == learns


def read_by(own, x, mode, sharp=None):
    """What comes back of x, weighed and summed; its gradients by the gate's bias and by x."""
    weights = jnp.asarray(np.random.default_rng(3).standard_normal(x.shape), jnp.float32)
    graph, state = nnx.split(own)

    @jax.jit
    def loss(state, x):
        own = nnx.merge(graph, state)
        how = {"mode": mode} | ({} if sharp is None else {"sharp": jnp.float32(sharp)})
        return (through(own, own.basis(), x, **how)[0] * weights).sum()

    value, (by_own, by_x) = jax.value_and_grad(loss, (0, 1))(state, x)
    return float(value), by_own["b"][...], by_x


@pytest.mark.parametrize("stored", ["plain", "masked"])
def test_a_hardened_mask_stores_as_a_cache_and_learns_as_the_soft_one(stored):
    changes = {"tilt": 2.0, "stored": stored, "basis_learns_from_gate": False}
    own = perturbed(fitted(tiny(), **changes), 0.05).layers[0].keys
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, 2, 8)), jnp.float32)
    soft, soft_bias, soft_x = read_by(own, x, "soft")
    hard, hard_bias, hard_x = read_by(own, x, "hard")
    assert abs(soft - hard) > 1e-3
    for sharp, value, slope in ((0, soft, soft_x), (1, hard, hard_x)):
        found, bias, by_x = read_by(own, x, "soft", sharp)
        np.testing.assert_allclose(found, value, rtol=1e-5)
        # What is lost is linear in the mask here, so the gate's gradient does not change at all.
        np.testing.assert_allclose(bias, soft_bias, rtol=1e-4, atol=1e-5)
        if stored == "plain":
            np.testing.assert_allclose(by_x, slope, rtol=1e-4, atol=1e-5)
    if stored == "plain":
        assert not np.asarray(hard_bias).any()
