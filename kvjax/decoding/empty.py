"""An empty cache for a model: with the constants that its keys and its vocabulary need."""

import dataclasses

from kvjax.cache import KVCache, init_cache
from kvjax.cache.geometry import Geometry
from kvjax.decoding.calibration import key_bases
from kvjax.decoding.notes import with_vocabulary
from kvjax.dynakv.projector import read_spectra
from kvjax.loading import LanguageModel


def empty_cache(lm: LanguageModel, geometry: Geometry) -> KVCache:
    """What ``kvjax.cache.init_cache`` makes of a geometry, for this model.

    Raises:
        UsageError: an adapter that latents need is no longer what it was, or for another model.
    """
    based = any(
        shape.codec.center or shape.codec.balance
        for layer in geometry.layers
        for shape in layer.classes
    )
    spectra = None
    if geometry.projector is not None:
        spectra = read_spectra(geometry.projector, lm).layers
    cache = init_cache(geometry, key_bases(lm) if based else None, spectra)
    if cache.ledger is None:
        return cache
    return dataclasses.replace(cache, ledger=with_vocabulary(cache.ledger, lm))
