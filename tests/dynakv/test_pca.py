"""The first basis: principal components of the model's own keys and values."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.dynakv.forward import read
from kvjax.dynakv.pca import principal_basis, spectra_of
from kvjax.dynakv.settings import SpectralSettings
from kvjax.errors import NumericalError, UsageError
from tests.dynakv.tiny import WIDTH, fitted, tiny, tokens


def states(lm, ids, keys) -> list[np.ndarray]:
    """Keys and values [N, d] of the first layer, out of the attention module itself."""

    def attend(index, module, angles, own, q, k, v, sinks):
        return q, (k, v)

    _, [found] = read(lm.model, jnp.asarray(ids), attend, (None,), keys=keys)
    return [np.asarray(x, np.float64).reshape(ids.size, -1) for x in found]


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama", "normed"),
        ("qwen3", "raw"),
        pytest.param("qwen3", "normed", marks=pytest.mark.slow),
    ],
)
def test_columns_are_eigenvectors_by_descending_variance(family, keys):
    lm = tiny(family)
    ids = tokens(lm, (4, 32), seed=9)
    layer = fitted(lm, keys=keys, centre="covariance").layers[0]
    for part, x in zip((layer.keys, layer.values), states(lm, ids, keys), strict=True):
        u = np.asarray(part.u[...], np.float64)
        spread = u.T @ np.cov(x.T, bias=True) @ u
        variance = np.diag(spread)
        assert (np.diff(variance) <= 1e-5 * variance[0]).all()
        assert np.abs(spread - np.diag(variance)).max() < 1e-5 * variance[0]
        np.testing.assert_allclose(u.T @ u, np.eye(len(u)), atol=1e-5)
        assert (np.take_along_axis(u, np.abs(u).argmax(0)[None], 0) > 0).all()
    assert np.abs(layer.keys.u[...] - layer.values.u[...]).max() > 0.1


def test_the_first_components_rebuild_better_than_any_others():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 8)) @ rng.standard_normal((8, 8))
    x = x - x.mean(0)
    u, _ = principal_basis(len(x), x.sum(0), x.T @ x, "covariance")

    def error(columns):
        part = u[:, columns]
        return np.square(x - x @ part @ part.T).sum()

    for _ in range(50):
        rank = int(rng.integers(1, 8))
        other = rng.permutation(8)[:rank]
        assert error(list(range(rank))) <= error(list(other)) * (1 + 1e-9)


def test_centres():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4000, 4)) * [0.1, 1, 2, 3] + [50, 0, 0, 0]
    sums = (len(x), x.sum(0), x.T @ x)
    around, mean = principal_basis(*sums, "covariance")
    about_zero, _ = principal_basis(*sums, "moment")
    np.testing.assert_allclose(mean, x.mean(0))
    assert np.abs(around[:, 0]).argmax() == 3 and np.abs(about_zero[:, 0]).argmax() == 0
    np.testing.assert_array_equal(principal_basis(*sums, "mean")[0], around)


def test_a_mean_that_is_taken_off_comes_back():
    layer = fitted(tiny(), centre="mean", gate="fixed", key_rank=1, value_rank=1).layers[0]
    own = layer.keys
    x = own.mean[...][None, None]
    latent = own.latent(x, own.basis())
    np.testing.assert_allclose(latent, 0, atol=1e-6)
    np.testing.assert_allclose(own.rebuild(latent, own.basis()), x, atol=1e-6)


def test_padding_and_batches_make_no_difference():
    lm = tiny()
    ids = tokens(lm, (4, 16))
    whole = spectra_of(lm.model, [(ids, np.ones(ids.shape, bool))], SpectralSettings())
    wide = np.pad(ids, ((0, 0), (0, 4)), constant_values=7)
    valid = np.arange(20)[None] < np.full((4, 1), 16)
    parts = [(wide[:2], valid[:2]), (wide[2:], valid[2:])]
    split = spectra_of(lm.model, parts, SpectralSettings())
    for name in ("keys", "values"):
        one, other = (getattr(s.layers[0], name).u[...] for s in (whole, split))
        np.testing.assert_allclose(one, other, atol=1e-3)


def test_what_gives_no_basis_is_refused():
    lm = tiny()
    with pytest.raises(UsageError, match="no tokens"):
        spectra_of(lm.model, [], SpectralSettings())
    with pytest.raises(UsageError, match=f"key_rank must be at most {WIDTH}.*got 17"):
        fitted(lm, gate="fixed", key_rank=17, value_rank=1)
    with pytest.raises(NumericalError, match="not finite"):
        principal_basis(1, np.zeros(2), np.full((2, 2), np.nan), "covariance")
