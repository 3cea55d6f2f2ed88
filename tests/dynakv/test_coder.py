"""The matrices of a cache against the bases and gates that they are made of."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.dynakv.cached import latents, rebuilt
from kvjax.dynakv.coder import Coder
from tests.dynakv.decoding import BLOCK, spectra
from tests.dynakv.tiny import WIDTH, tiny, with_settings

CASES = {
    "token": {},
    "token, means": {"centre": "mean", "inverse": "free"},
    "token, masked": {"stored": "masked", "tau": 0.3},
    "token, orthogonal": {"inverse": "orthogonal"},
    "layer": {"gate": "layer"},
    "layer, masked, means": {"gate": "layer", "stored": "masked", "centre": "mean"},
    "fixed": {"gate": "fixed", "key_rank": 5, "value_rank": WIDTH},
    "fixed, means": {"gate": "fixed", "key_rank": 1, "value_rank": 6, "centre": "mean"},
}


@pytest.mark.parametrize("multiple", [1, BLOCK, 5], ids="multiple {}".format)
@pytest.mark.parametrize("case", CASES)
def test_it_stores_and_rebuilds_what_bases_and_gates_do(case, multiple):
    config = tiny("llama", 1).config
    layer = with_settings(spectra(layers=1, **CASES[case]), rank_multiple=multiple).layers[0]
    coder = Coder.of(layer, jnp.float32)
    rng = np.random.default_rng(1)
    shape = 3, 40, config.num_kv_heads, config.head_dim
    pair = [jnp.asarray(3 * rng.standard_normal(shape), jnp.float32) for _ in range(2)]
    found = latents(coder, *pair, jnp.float32)
    pos = jnp.zeros(shape[:2], jnp.int32)  # not turned
    ranks = []
    for side, (own, x, back) in enumerate(
        zip((layer.keys, layer.values), pair, rebuilt(coder, found, pos, config), strict=True)
    ):
        latent = own.latent(x.reshape(*shape[:2], -1), own.basis())
        wanted = own.stored(latent, own.mask(latent))
        np.testing.assert_array_equal(found[:, :, side] != 0, wanted != 0)
        np.testing.assert_allclose(found[:, :, side], wanted, rtol=1e-5, atol=1e-5)
        again = own.rebuild(wanted, own.basis())
        np.testing.assert_allclose(back.reshape(again.shape), again, rtol=1e-4, atol=1e-4)
        ranks.append(np.asarray(own.ranks(own.mask(latent))))
    assert (len(np.unique(ranks)) > 2) == case.startswith("token")


def test_a_model_in_bfloat16_has_its_keys_rebuilt_in_it():
    """By a rounded matrix, and values by an exact one; components and ranks are float32's."""
    config = tiny("llama", 1).config
    layer = spectra(layers=1, centre="mean").layers[0]
    exact, coder = (Coder.of(layer, dtype) for dtype in (jnp.float32, jnp.bfloat16))
    assert coder.keys.back.dtype == jnp.bfloat16 and coder.values.back.dtype == jnp.float32
    x = np.random.default_rng(2).standard_normal((2, 1, 9, WIDTH)).astype(np.float32)
    latent = exact.latents(jnp.asarray(x))
    np.testing.assert_array_equal(coder.latents(jnp.asarray(x)), latent)
    latent, pos = jnp.moveaxis(latent, 0, 2), jnp.arange(9, dtype=jnp.int32)[None]
    (k, v), (rounded, same) = (rebuilt(own, latent, pos, config) for own in (exact, coder))
    np.testing.assert_array_equal(v, same)
    assert 0 < np.abs(k - rounded).max() < 2**-8 * np.abs(k).max()


def test_matrices_are_arrays_of_their_own():
    """A cache is donated, and what an adapter was read into is not."""
    layer = spectra(layers=1, centre="mean", inverse="free").layers[0]
    coder = Coder.of(layer, jnp.float32)
    given = {id(own) for part in (layer.keys, layer.values) for own in (part.u_inverse[...],
             part.mean[...], part.u[...], part.w[...], part.b[...])}  # fmt: skip
    for basis in (coder.keys, coder.values):
        for array in (basis.back, basis.mean):
            assert id(array) not in given
            array.delete()
    assert (
        np.isfinite(layer.keys.u_inverse[...]).all() and np.isfinite(layer.values.mean[...]).all()
    )
