"""What a basis starts from: the principal components of a model's own keys and values."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kvjax.dynakv.forward import plain_attention, read
from kvjax.dynakv.settings import SpectralSettings
from kvjax.dynakv.spectrum import LayerSpectra, Spectra, Spectrum, key_width
from kvjax.errors import NumericalError, UsageError
from kvjax.models.decoder import Decoder, KeyStage
from kvjax.models.rope import rotate


def spectra_of(
    model: Decoder,
    batches: Iterable[tuple[Int[Array | np.ndarray, "B T"], Bool[Array | np.ndarray, "B T"]]],
    settings: SpectralSettings,
) -> Spectra:
    """Spectra whose bases are fitted to the keys and values of some text.

    Args:
        model: the decoder.
        batches: its tokens, and which of them are no padding.
        settings: how keys and values are compressed.

    Raises:
        UsageError: a rank that the model's keys cannot have, or no tokens.
        NumericalError: the model's keys or values are not finite.
    """
    settings.check_width(key_width(model.config), model.config.num_layers)
    count, layers = moments(model, batches, keys=settings.keys)
    fitted = [_layer(count, *sums, settings, n) for n, sums in enumerate(layers)]
    return Spectra(fitted, settings)


def moments(
    model: Decoder,
    batches: Iterable[tuple[Int[Array | np.ndarray, "B T"], Bool[Array | np.ndarray, "B T"]]],
    *,
    keys: KeyStage,
) -> tuple[int, list[tuple[Float[np.ndarray, "2 d"], Float[np.ndarray, "2 d d"]]]]:
    """How many tokens, and each layer's sums and sums of products of keys (0) and values (1).

    Args:
        model: the decoder.
        batches: its tokens, and which of them are no padding.
        keys: the stage at which keys are taken.

    Raises:
        UsageError: there are no tokens.
    """
    graph, state = nnx.split(model)
    total = None
    for tokens, valid in batches:
        found = jax.device_get(_moments(graph, state, tokens, valid, keys=keys))
        found = jax.tree.map(lambda leaf: leaf.astype(np.float64), found)
        total = found if total is None else jax.tree.map(np.add, total, found)
    if total is None or not total[0]:
        raise UsageError("no tokens to find a basis from")
    return int(total[0]), total[1]


def principal_basis(
    count: int, mean_sum: Float[np.ndarray, " d"], products: Float[np.ndarray, "d d"], centre: str
) -> tuple[Float[np.ndarray, "d d"], Float[np.ndarray, " d"]]:
    """Orthonormal columns by descending variance, and the mean; in float64.

    The sign of a column makes its largest entry positive, so that a basis does not depend on the
    library that computes it.
    """
    mean, second = mean_sum / count, products / count
    spread = second if centre == "moment" else second - np.outer(mean, mean)
    if not np.isfinite(spread).all():
        raise NumericalError("the model's keys or values are not finite: no basis can be found")
    basis = np.linalg.eigh((spread + spread.T) / 2)[1][:, ::-1]
    largest = np.take_along_axis(basis, np.abs(basis).argmax(0)[None], 0)
    return basis * np.sign(largest), mean


def _layer(count: int, sums, products, settings: SpectralSettings, layer: int) -> LayerSpectra:
    spectra = []
    for part, rank in enumerate(settings.ranks(layer)):
        basis, mean = principal_basis(count, sums[part], products[part], settings.centre)
        u, mean = (jnp.asarray(x, jnp.float32) for x in (basis, mean))
        spectra.append(Spectrum(u, mean, settings, rank))
    return LayerSpectra(*spectra)


@jax.jit(static_argnums=0, static_argnames="keys")
def _moments(graph, state, tokens, valid, *, keys: KeyStage):
    """`moments` of one batch."""
    model = nnx.merge(graph, state)
    config = model.config

    def attend(index, module, angles, own, q, k, v, sinks):
        del own
        flat = jnp.stack([x.reshape(-1, key_width(config)).astype(jnp.float32) for x in (k, v)])
        flat = jnp.where(valid.reshape(1, -1, 1), flat, 0.0)
        highest = jax.lax.Precision.HIGHEST
        sums = (flat.sum(1), jnp.einsum("pnd,pne->pde", flat, flat, precision=highest))
        k = module.norm_keys(k) if keys == "raw" else k
        k = k if keys == "rotated" else rotate(k, *angles)
        return plain_attention(config, index, q, k, v, sinks), sums

    _, sums = read(model, tokens, attend, (None,) * config.num_layers, keys=keys)
    return valid.sum(dtype=jnp.int32), sums
