"""An empty cache for a model: with the constants that its keys and its vocabulary need."""

import dataclasses
import functools

import jax

from kvjax.cache import KVCache, init_cache
from kvjax.cache.geometry import Geometry
from kvjax.decoding.calibration import key_bases
from kvjax.decoding.notes import with_vocabulary
from kvjax.dynakv.coder import Coder
from kvjax.dynakv.projector import read_spectra
from kvjax.loading import LanguageModel
from kvjax.sharding import per_shard


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
    coders = None
    if geometry.projector is not None:
        spectra = read_spectra(geometry.projector, lm)
        coders = [Coder.of(layer, geometry.dtype) for layer in spectra.layers]
        # Pools are planned to have what these take, and modules refer to themselves.
        for array in jax.tree.leaves(spectra):
            array.delete()
    bases = key_bases(lm) if based else None
    cache = (
        init_cache(geometry, bases, coders)
        if lm.mesh is None
        else spread_cache(bases, coders, geometry=geometry)
    )
    if cache.ledger is None:
        return cache
    return dataclasses.replace(cache, ledger=with_vocabulary(cache.ledger, lm))


@functools.partial(jax.jit, static_argnames=("geometry",))
@per_shard
def spread_cache(bases, coders=None, *, geometry: Geometry) -> KVCache:
    """What each device of a mesh has: ``init_cache`` as one program, on the devices of the mesh."""
    return init_cache(geometry, bases, coders)
