"""Codecs to go through, and numbers to give them."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.codecs import ADVERTISED, Codec, Encoded, kv_codec
from pallas_kernels.formats import unpack


def tensor_codec(name: str) -> Codec:
    """A codec by a name such as "kivi2.k"."""
    spec, _, tensor = name.partition(".")
    return getattr(kv_codec(spec), tensor)


# Mixed names, such as k4v2, are made of the codecs of the plain ones.
NAMES = [f"{spec}.{tensor}" for spec in (*ADVERTISED, "kivi2-g64") for tensor in "kv"]
DISTINCT = {
    (codec.fmt, codec.tokens, codec.channels, codec.ternary_rule): name
    for name in reversed(NAMES)
    for codec in [tensor_codec(name)]
}
CODECS = sorted(name for name in DISTINCT.values() if tensor_codec(name).fmt != "float")


def numbers(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Normal numbers, tokens and channels of very different sizes."""
    rng = np.random.default_rng(seed)
    tokens = np.exp(rng.normal(size=(*shape[:-1], 1)))
    channels = np.exp(rng.normal(size=shape[-1]))
    return (rng.standard_normal(shape) * tokens * channels).astype(np.float32)


_encode = jax.jit(Codec.encode, static_argnums=0)
_decode = jax.jit(Codec.decode, static_argnums=0)


def encode(codec: Codec, x) -> Encoded:
    return _encode(codec, jnp.asarray(x))


def decode(codec: Codec, stored: Encoded) -> np.ndarray:
    return np.asarray(_decode(codec, stored))


def blocks(codec: Codec, x: np.ndarray) -> np.ndarray:
    """Numbers, or codes, block by block: [..., n, m, numbers of a block]."""
    *batch, tokens, dim = x.shape
    channels = codec.channels or dim
    apart = x.reshape(
        *batch, tokens // codec.tokens, codec.tokens, dim // channels, channels
    ).swapaxes(-3, -2)
    return apart.reshape(*apart.shape[:-2], -1)


def block_codes(codec: Codec, stored: Encoded) -> np.ndarray:
    return blocks(codec, np.asarray(unpack(stored.codes, codec.fmt, -1)))


def block_numbers(codec: Codec, stored: Encoded) -> np.ndarray:
    return blocks(codec, decode(codec, stored))


def steps(number) -> np.ndarray:
    """A scale or zero point to put beside blocks, in float64."""
    return np.asarray(number).astype(np.float64)[..., None]
