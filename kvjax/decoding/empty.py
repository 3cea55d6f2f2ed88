"""An empty cache for a model: with the constants that its keys and its vocabulary need."""

import dataclasses

from kvjax.cache import KVCache, init_cache
from kvjax.cache.geometry import Geometry
from kvjax.decoding.calibration import key_bases
from kvjax.decoding.notes import with_vocabulary
from kvjax.loading import LanguageModel


def empty_cache(lm: LanguageModel, geometry: Geometry) -> KVCache:
    """What ``kvjax.cache.init_cache`` makes of a geometry, for this model."""
    cache = init_cache(geometry, key_bases(lm) if geometry.constant_bytes else None)
    if cache.ledger is None:
        return cache
    return dataclasses.replace(cache, ledger=with_vocabulary(cache.ledger, lm))
