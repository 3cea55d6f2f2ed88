"""What a cache makes of a layer's bases and gates: the matrices that a token is multiplied by."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.dynakv.mask import prefix, rank_of_logits, soft_mask
from kvjax.dynakv.product import product
from kvjax.dynakv.settings import SpectralSettings
from kvjax.dynakv.spectrum import LayerSpectra, Spectrum
from kvjax.sharding.across import own
from pallas_kernels.latent_attention.layout import Basis


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coder:
    """From keys (0) and values (1) to latents, and back.

    Attributes:
        into: what a token's channels are multiplied by: for its components and, behind them, for
            the gate's logits, if tokens have ranks of their own. Otherwise components behind the
            layer's rank come out as zero.
        bias: of the gate's logits, or None.
        keys: what rebuilds keys; its ``back`` is in the model's dtype, in which they are read.
        values: what rebuilds values.
        settings: how they are compressed.
    """

    into: Float[Array, "2 d e"]
    bias: Float[Array, "2 d"] | None
    keys: Basis
    values: Basis
    settings: SpectralSettings = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, layer: LayerSpectra, dtype: DTypeLike) -> "Coder":
        """A layer's, every matrix an array of its own.

        Args:
            layer: with the settings that the cache stores by.
            dtype: the model's.
        """
        pair = layer.keys, layer.values
        bases = [spectrum.basis() for spectrum in pair]
        into, bias = jnp.stack([u for u, _ in bases]), None
        if layer.keys.w is None:
            into *= jnp.stack([_kept(spectrum) for spectrum in pair])[:, None]
        else:
            # The gate reads components: its weights times the basis read channels.
            gates = [product(u, own.w[...]) for own, (u, _) in zip(pair, bases, strict=True)]
            into = jnp.concatenate([into, jnp.stack(gates)], -1)
            bias = jnp.stack([spectrum.b[...] for spectrum in pair])
        keys, values = (
            Basis(back + 0, None if spectrum.mean is None else spectrum.mean[...] + 0)
            for spectrum, (_, back) in zip(pair, bases, strict=True)
        )
        keys = dataclasses.replace(keys, back=keys.back.astype(dtype))
        return cls(into, bias, keys, values, layer.keys.settings)

    def latents(self, x: Float[Array, "2 B T d"]) -> Float[Array, "2 B T d"]:
        """Components of keys and of values, zero behind a token's ranks."""
        x = x.astype(jnp.float32)
        if self.keys.mean is not None:
            x -= jnp.stack([self.keys.mean, self.values.mean])[:, None, None]
        made = jnp.einsum("sbtd,sde->sbte", x, self.into, precision=jax.lax.Precision.HIGHEST)
        if self.bias is None:
            return made
        latent, logits = jnp.split(made, 2, -1)
        logits += self.bias[:, None, None]
        rank = rank_of_logits(logits, self.settings.tau, self.settings.rank_multiple)
        if self.settings.stored == "masked":
            latent *= soft_mask(logits)
        return jnp.where(prefix(rank, latent.shape[-1]), latent, 0.0)

    def bases(self) -> tuple[Basis, Basis]:
        """What rebuilds keys and values: a device's own heads of them."""
        return tuple(
            Basis(own(basis.back, 1), None if basis.mean is None else own(basis.mean))
            for basis in (self.keys, self.values)
        )


def _kept(spectrum: Spectrum) -> Float[Array, " d"]:
    """What components are multiplied by to be stored, where it is the same for all tokens."""
    one = jnp.ones((1, 1, len(spectrum.u[...])), jnp.float32)
    return spectrum.stored(one, spectrum.mask(one))[0, 0]
