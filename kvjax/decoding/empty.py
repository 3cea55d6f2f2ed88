"""An empty cache for a model: with the constants that its keys and its vocabulary need."""

from kvjax.cache import KVCache, init_cache
from kvjax.cache.geometry import Geometry
from kvjax.decoding.calibration import key_bases
from kvjax.decoding.notes import newlines
from kvjax.loading import LanguageModel


def empty_cache(lm: LanguageModel, geometry: Geometry) -> KVCache:
    """What ``kvjax.cache.init_cache`` makes of a geometry, for this model."""
    bases = key_bases(lm) if geometry.constant_bytes else None
    return init_cache(geometry, bases, newlines(lm) if geometry.noted else None)
