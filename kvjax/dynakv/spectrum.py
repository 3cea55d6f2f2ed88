"""The learned basis and gate of keys or values: parameters beside a layer, never inside it."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.dynakv.mask import prefix, rank_of, soft_mask
from kvjax.dynakv.product import product
from kvjax.dynakv.settings import SpectralSettings
from kvjax.models.config import ModelConfig

_HIGHEST = jax.lax.Precision.HIGHEST


class SpectralGate(nnx.Variable):
    """A parameter that training may change."""


class SpectralConstant(nnx.Variable):
    """An array that stays as it was when the basis was found."""


Basis = tuple[Float[Array, "d d"], Float[Array, "d d"]]
"""U, whose columns are the components, and what rebuilds."""


class Spectrum(nnx.Module):
    """The basis and gate of one layer's keys, or of its values.

    All KV heads are one vector of d = Hkv * D components. Everything is float32.

    Attributes:
        u: [d, d]; a constant where the basis is to stay orthogonal.
        u_inverse: [d, d] or None: where the inverse is free.
        turn: [d, d] or None: where the basis is orthogonal, U is ``u`` times the Cayley transform
            of ``turn - turn.T``.
        mean: [d] or None: where it is taken off.
        w: [d, d] or None: where each token has its own rank.
        b: [d] or None: where anything is learned of ranks.
        rank: the fixed rank, or None.
    """

    def __init__(
        self,
        u: Float[Array, "d d"],
        mean: Float[Array, " d"],
        settings: SpectralSettings,
        rank: int | None,
    ):
        width = len(mean)
        self.settings = settings
        self.rank = rank
        orthogonal = settings.inverse == "orthogonal"
        self.u = SpectralConstant(u) if orthogonal else SpectralGate(u)
        self.turn = SpectralGate(jnp.zeros((width, width))) if orthogonal else None
        self.u_inverse = SpectralGate(u.T) if settings.inverse == "free" else None
        self.mean = SpectralConstant(mean) if settings.centre == "mean" else None
        rising = settings.tilt / width * jnp.arange(width, dtype=jnp.float32)
        self.w = SpectralGate(jnp.zeros((width, width))) if settings.gate == "token" else None
        self.b = None if settings.gate == "fixed" else SpectralGate(rising)

    def basis(self) -> Basis:
        """U and what rebuilds, for all tokens of a step."""
        (found,) = _bases([self])
        return found

    def latent(
        self, x: Float[Array, "B T d"], basis: Basis, exact: bool = True
    ) -> Float[Array, "B T d"]:
        """The components of keys or values; ``exact``, here and below: see `product`."""
        x = x.astype(jnp.float32)
        x = x if self.mean is None else x - self.mean[...][None, None]
        return product(x, basis[0], exact)

    def mask(self, latent: Float[Array, "B T d"], exact: bool = True) -> Float[Array, "B T d"]:
        """The soft mask of each token; of a fixed rank, ones and zeros."""
        if self.b is None:
            rank = jnp.full(latent.shape[:2], self.rank, jnp.int32)
            return prefix(rank, latent.shape[-1]).astype(jnp.float32)
        return soft_mask(self.logits(latent, exact), exact)

    def logits(self, latent: Float[Array, "B T d"], exact: bool = True) -> Float[Array, "B T d"]:
        """What the gate makes of each token's components."""
        logits = jnp.broadcast_to(self.b[...][None, None], latent.shape)
        if self.w is not None:
            seen = latent if self.settings.basis_learns_from_gate else jax.lax.stop_gradient(latent)
            logits = logits + product(seen, self.w[...], exact)
        return logits

    def ranks(self, mask: Float[Array, "*B d"]) -> Int[Array, "*B"]:
        """Components that are stored of each token."""
        return rank_of(mask, self.settings.tau, self.settings.rank_multiple)

    def stored(
        self, latent: Float[Array, "*B d"], mask: Float[Array, "*B d"]
    ) -> Float[Array, "*B d"]:
        """The components as a cache keeps them: those behind a token's rank are zero."""
        kept = prefix(self.ranks(mask), latent.shape[-1])
        value = latent * mask if self.settings.stored == "masked" else latent
        return jnp.where(kept, value, 0.0)

    def rebuild(
        self, latent: Float[Array, "B T d"], basis: Basis, exact: bool = True
    ) -> Float[Array, "B T d"]:
        """Keys or values out of their components."""
        x = product(latent, basis[1], exact)
        return x if self.mean is None else x + self.mean[...][None, None]


def turned(u: Float[Array, "*N d d"], turn: Float[Array, "*N d d"]) -> Float[Array, "*N d d"]:
    """U times the Cayley transform of ``turn - turn.T``: as orthogonal as U, and U itself at 0."""
    half = (turn - turn.mT) / 2
    one = jnp.broadcast_to(jnp.eye(turn.shape[-1]), turn.shape)
    return jnp.matmul(u, jnp.linalg.solve(one - half, one + half), precision=_HIGHEST)


def _bases(spectra: list[Spectrum]) -> list[Basis]:
    """The bases of spectra of one kind, by one operation each: GPUs are slow to invert one matrix
    after the other."""

    def every(name: str) -> Float[Array, "N d d"] | None:
        found = [getattr(spectrum, name) for spectrum in spectra]
        return None if found[0] is None else jnp.stack([one[...] for one in found])

    u, turn, back = (every(name) for name in ("u", "turn", "u_inverse"))
    if turn is not None:
        u = turned(u, turn)
        back = u.mT
    elif back is None:
        back = jnp.linalg.inv(u)
    return list(zip(u, back, strict=True))


class LayerSpectra(nnx.Module):
    """What stands beside one layer: the spectrum of its keys and that of its values."""

    def __init__(self, keys: Spectrum, values: Spectrum):
        self.keys = keys
        self.values = values

    def bases(self) -> tuple[Basis, Basis]:
        return self.keys.basis(), self.values.basis()


class Spectra(nnx.Module):
    """What stands beside a model.

    Attributes:
        layers: one `LayerSpectra` each.
    """

    def __init__(self, layers: list[LayerSpectra], settings: SpectralSettings):
        self.settings = settings
        self.layers = nnx.List(layers)

    def bases(self) -> tuple[tuple[Basis, Basis], ...]:
        """The bases of every layer, to be computed once a step."""
        found = _bases([part for layer in self.layers for part in (layer.keys, layer.values)])
        return tuple(zip(found[::2], found[1::2], strict=True))


def key_width(config: ModelConfig) -> int:
    """Components of a token's keys, all heads together."""
    return config.num_kv_heads * config.head_dim


def blank(config: ModelConfig, settings: SpectralSettings) -> Spectra:
    """Spectra of the right shapes in the standard basis.

    Raises:
        UsageError: a rank that the model's keys cannot have.
    """
    width = key_width(config)
    settings.check_width(width, config.num_layers)
    layers = [blank_layer(width, settings, layer) for layer in range(config.num_layers)]
    return Spectra(layers, settings)


def blank_layer(width: int, settings: SpectralSettings, layer: int) -> LayerSpectra:
    """One layer's, in the standard basis."""
    return LayerSpectra(
        *(
            Spectrum(jnp.eye(width), jnp.zeros(width), settings, rank)
            for rank in settings.ranks(layer)
        )
    )


def with_settings(spectra: Spectra, settings: SpectralSettings) -> Spectra:
    """The same arrays, used otherwise."""
    copy = nnx.merge(*nnx.split(spectra))
    copy.settings = settings
    for layer in copy.layers:
        layer.keys.settings = layer.values.settings = settings
    return copy
