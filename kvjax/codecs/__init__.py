"""Codecs: in which numbers keys and values are stored, and the basis that makes these few bits do.

>>> from kvjax.codecs import kv_codec
>>> codec = kv_codec("k4v2")
>>> codec.k.payload_bits(64), codec.v.payload_bits(64)
(4.25, 2.25)
"""

from kvjax.codecs.basis import (
    KeyBasis,
    code_keys,
    code_queries,
    code_values,
    plain_keys,
    plain_output,
)
from kvjax.codecs.calibrate import key_basis
from kvjax.codecs.codec import Codec, Encoded, KVCodec, latent_codec
from kvjax.codecs.names import ADVERTISED, kv_codec
from pallas_kernels.rotation import rotate, rotation, unrotate

__all__ = [
    "ADVERTISED",
    "Codec",
    "Encoded",
    "KVCodec",
    "KeyBasis",
    "code_keys",
    "code_queries",
    "code_values",
    "key_basis",
    "kv_codec",
    "latent_codec",
    "plain_keys",
    "plain_output",
    "rotate",
    "rotation",
    "unrotate",
]
