"""The key basis of a model's layers, out of a text that is the same for everybody.

The constants belong to the model alone: were they taken from a prompt, rows would feel each other.
"""

import contextlib
import hashlib
import pathlib

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from kvjax.codecs import KeyBasis, key_basis
from kvjax.fetch_model import cache_folder
from kvjax.files import write_atomically
from kvjax.loading import LanguageModel
from kvjax.models.attention import add_sinks, causal_attention
from kvjax.models.forward import by_layer

TEXT = """\
The harbour was quiet when the survey began. Each morning two people walked along the wall, counted
the boats, wrote down the wind and the height of the water, and sent the figures to the office in
town. Question: if 14 boats leave at 6:30 and 9 come back before noon, how many are still out at
noon? First, 14 boats left. Then 9 returned, so 14 - 9 = 5. Wait, one of them left again at 11:45,
which makes 5 + 1 = 6. The answer is 6.

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)

In 1987 the lighthouse got an electric lamp; its keeper, Ms. Oddny Hansen (born 1931), stayed on as
a guide. "It blinks by itself now," she said, "but somebody has to tell people why." La lumière se
voit à trente kilomètres. Das Wasser stieg um 0,8 m. Therefore, let x be the height of the tide at
time t; then x(t) = a cos(2 pi t / 12.4) + b, and both a and b follow from two measurements.
"""


SPAN = 4096
"""Positions that the text is spread over."""


def key_bases(lm: LanguageModel) -> tuple[KeyBasis, ...]:
    """Mean and balance of every layer's keys, float32 [Hkv, D] each.

    Kept in the cache folder under the model's fingerprint.
    """
    path = _path(lm)
    names = ("mean", "balance")
    with contextlib.suppress(OSError, safetensors.SafetensorError, KeyError):
        kept = safetensors.numpy.load_file(path)
        return tuple(
            KeyBasis(*(jnp.asarray(kept[f"{layer}.{name}"]) for name in names))
            for layer in range(lm.config.num_layers)
        )
    bases = _measure(lm)
    arrays = {
        f"{layer}.{name}": np.asarray(getattr(basis, name))
        for layer, basis in enumerate(bases)
        for name in names
    }
    with contextlib.suppress(OSError):  # then it is measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, safetensors.numpy.save(arrays))
    return bases


def _path(lm: LanguageModel) -> pathlib.Path:
    text = hashlib.sha256(f"{SPAN} {TEXT}".encode()).hexdigest()[:8]
    heads = "" if lm.copies == 1 else f"-{lm.copies}"
    return cache_folder() / "keys" / f"{lm.fingerprint}-{text}{heads}.safetensors"


def _measure(lm: LanguageModel) -> tuple[KeyBasis, ...]:
    config, model = lm.config, lm.model
    if lm.tokenizer is not None:
        ids = lm.tokenizer.encode(TEXT)
    else:
        ids = np.arange(256) * 7919 % config.vocab_size
    tokens = jnp.asarray(ids, jnp.int32)[None]
    # Spread out, since the keys that a mean is taken of turn with their position.
    stride = max(1, min(SPAN, config.context_length) // tokens.shape[1])
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] * stride
    read = by_layer(model, tokens, positions, _keys)
    return tuple(key_basis(k[0], center=True, balance=True) for _, k in read)


def _keys(q, k, v, sinks, positions, scale: float, window: int | None):
    """A layer's attention and its keys."""
    out, lse = causal_attention(q, k, v, positions, scale, window)
    return add_sinks(out, lse, sinks).astype(q.dtype), k
