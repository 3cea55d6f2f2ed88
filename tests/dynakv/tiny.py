"""Models of one or two layers with random weights, and spectra that are far from the start."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import kvjax
from kvjax.dynakv import spectrum
from kvjax.dynakv.forward import compressed_states
from kvjax.dynakv.pca import spectra_of
from kvjax.dynakv.settings import SpectralSettings
from kvjax.dynakv.spectrum import Spectra
from kvjax.loading import GenerationDefaults
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from tests.models.configs import small
from tests.models.modules import randomised

WIDTH = 16  # of the llama's keys


@functools.cache
def tiny(family: str = "llama", layers: int = 1) -> kvjax.LanguageModel:
    """A random model without a tokenizer."""
    config = ModelConfig.from_hf(small(family, num_hidden_layers=layers))

    def build() -> Decoder:
        return Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(0))

    return kvjax.LanguageModel(
        config=config,
        model=randomised(build, 0.3),
        tokenizer=None,
        dtype=jnp.dtype("float32"),
        defaults=GenerationDefaults(),
        source=f"tiny {family}",
        revision=None,
        fingerprint=f"{layers:064}",
    )


def tokens(lm: kvjax.LanguageModel, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(lm.config.vocab_size, size=shape).astype(np.int32)


def fitted(lm: kvjax.LanguageModel, **settings) -> Spectra:
    """Spectra that start from the model's principal components."""
    ids = tokens(lm, (4, 32), seed=9)
    return spectra_of(lm.model, [(ids, np.ones(ids.shape, bool))], SpectralSettings(**settings))


def perturbed(spectra: Spectra, spread: float = 0.1, gate: float = 1.0) -> Spectra:
    """Well-conditioned bases that are not orthogonal, and gates that tell tokens apart."""
    rng = np.random.default_rng(3)
    graph, state = nnx.split(spectra)

    def move(path, leaf):
        name = str(path[-2].key if hasattr(path[-2], "key") else path[-2])
        size = gate if name in ("w", "b") else spread
        noise = size * rng.standard_normal(leaf.shape)
        return leaf + jnp.asarray(noise, leaf.dtype)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(move, state))


@functools.partial(jax.jit, static_argnames="mode")
def run(model: Decoder, spectra: Spectra, ids, *, mode="hard", first_position=0):
    """Logits and rates."""
    hidden, rates = compressed_states(
        model, spectra, spectra.bases(), ids, mode=mode, first_position=first_position
    )
    return model.logits(hidden), rates


def with_settings(spectra: Spectra, **changes) -> Spectra:
    """The same arrays, used otherwise."""
    return spectrum.with_settings(spectra, dataclasses.replace(spectra.settings, **changes))
