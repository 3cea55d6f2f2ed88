"""What one row of a cache says, read without any of the code that serves attention, and what a
model must then say of the next tokens: dense attention in float32."""

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.cache import KVCache, LayerCache, init_cache, plan
from kvjax.codecs import KeyBasis, plain_output
from kvjax.codecs import plain_keys as in_the_models_basis
from kvjax.codecs.codec import Encoded
from kvjax.recipes import Recipe


def empty(lm: kvjax.LanguageModel, recipe: Recipe, tokens: int, bases=None, rows: int = 1):
    """A cache for so many tokens a row."""
    planned = plan(
        lm.config,
        recipe,
        batch_size=rows,
        prompt_tokens=tokens,
        max_new_tokens=64,
        dtype=lm.dtype,
        parameter_bytes=0,
    )
    return init_cache(planned.geometry, bases)


def plain(layer: LayerCache) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Keys and values [Hkv, S, D], biases and positions [Hkv, S] of the first row's slots."""
    found = []
    for pool, table, codec in zip(layer.pools, layer.tables, layer.codecs, strict=True):

        def of(name, turned, pool=pool, table=table):
            array = getattr(pool, name)
            if array is None:
                return None
            return array[table[:1]].swapaxes(-1, -2) if turned else array[table[:1]]

        k, v = (
            part.decode(Encoded(of(x, x == "v"), *(of(f"{x}_{n}", x == "v") for n in parts)))
            for x, part, parts in (
                ("k", codec.k, ("scale", "zero")),
                ("v", codec.v, ("scale", "zero")),
            )
        )
        heads, dim = table.shape[1], k.shape[-1]
        k = k.reshape(1, heads, -1, dim)
        basis = KeyBasis(pool.mean, pool.balance)
        found.append(
            (
                in_the_models_basis(codec, basis, k)[0],
                plain_output(codec, v).reshape(heads, -1, dim),
                pool.bias[table[0]].reshape(heads, -1),
                pool.pos[table[0]].reshape(heads, -1),
            )
        )
    return tuple(np.concatenate(parts, 1) for parts in zip(*found, strict=True))


def expected(lm: kvjax.LanguageModel, cache: KVCache, tokens) -> np.ndarray:
    """Float32 logits [T, V] of a row's next tokens, given what the cache holds of those before."""
    config, start = lm.config, int(cache.length[0])
    positions = start + jnp.arange(len(tokens), dtype=jnp.int32)[None]

    def attend(index, layer, q, k, v, sinks):
        old_k, old_v, bias, pos = plain(layer)
        heads, count = len(old_k), len(tokens)
        keys = np.concatenate([old_k, np.asarray(k[0]).swapaxes(0, 1)], 1, dtype=np.float64)
        values = np.concatenate([old_v, np.asarray(v[0]).swapaxes(0, 1)], 1, dtype=np.float64)
        pos = np.concatenate([pos, np.tile(np.asarray(positions), (heads, 1))], 1)
        bias = np.concatenate([bias, np.zeros((heads, count))], 1)
        out = np.zeros(q.shape[1:])
        for t, h in np.ndindex(out.shape[:2]):
            kv = h // (q.shape[2] // heads)
            far = int(positions[0, t]) - pos[kv]
            window = config.windows[index]
            seen = (bias[kv] > -np.inf) & (far >= 0) & (far < (window or np.inf))
            logits = keys[kv][seen] @ np.float64(q[0, t, h]) * config.scale + bias[kv][seen]
            extra = [] if sinks is None else [float(sinks[h])]
            weights = np.exp(np.append(logits, extra) - max([*logits, *extra]))
            out[t, h] = weights[: len(logits)] / weights.sum() @ values[kv][seen]
        return jnp.asarray(out, jnp.float32)[None], layer

    ids = jnp.asarray(tokens, jnp.int32)[None]
    hidden, _ = lm.model(ids, positions, attend, cache.layers)
    return np.asarray(jax.device_get(lm.model.logits(hidden[0])))
