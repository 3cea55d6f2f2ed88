"""Whole sequences through a model whose keys and values are compressed, without a cache."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.dynakv.spectrum import Basis, LayerSpectra, Spectra, Spectrum
from kvjax.models.attention import (
    add_sinks,
    causal_attention,
    causal_mask,
    masked_attention,
    merge,
)
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Attention, Decoder, KeyStage
from kvjax.models.fused import fused_attention, fused_attention_works
from kvjax.models.layers import rms_norm
from kvjax.models.rope import rotate, rotation

Mode = Literal["soft", "hard"]
"""As in training, by the mask itself, or as in use: the first ranks' components, all or nothing."""

Rates = tuple[Float[Array, "L 2 B T"], Float[Array, "L 2 B T"]]
"""Of every layer's keys and values, the share of components kept of each token, soft and hard."""


def read(
    model: Decoder,
    tokens: Int[Array, "B T"],
    attend: Callable[..., tuple[Array, Any]],
    beside: Sequence[Any],
    *,
    keys: KeyStage,
    remat: bool = False,
    first_position: int | Int[Array, ""] = 0,
) -> tuple[Float[Array, "B T E"], list[Any]]:
    """Let tokens through all layers, with an ``attend`` that takes part in gradients.

    Layers in a row that are alike, and have the same beside them, are one program in a loop, which
    compiles in a fraction of the time; their weights are copied for it.

    Args:
        attend: called with a layer's number (of those alike, the first one's), its attention
            module, the angles, what stands beside it, and what every ``attend`` gets (see
            `kvjax.models.decoder`).
        beside: what stands beside each layer.
        keys: the stage at which ``attend`` gets keys.
        remat: whether a layer's inside is computed again for its gradient; otherwise its products
            of matrices are kept, and what costs less than it takes is computed again.
        first_position: of every row.

    Returns:
        The hidden states after the final norm, and what ``attend`` returned beside its output.
    """
    config = model.config
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32) + first_position
    angles = rotation(jnp.broadcast_to(positions[None], tokens.shape), config.rope, config.head_dim)
    x, notes = model.embed[...][tokens], []
    policy = None if remat else jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    for first, alike in _alike(config, list(zip(model.layers, beside, strict=True))):

        def through(x, one, first=first):
            module, own = one
            bound = functools.partial(attend, first, module.attn, angles, own)
            return module(x, angles, bound, keys)

        through = jax.checkpoint(through, policy=policy, prevent_cse=False)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *alike)
        x, found = jax.lax.scan(through, x, stacked)
        notes += [jax.tree.map(lambda leaf, n=n: leaf[n], found) for n in range(len(alike))]
    return rms_norm(x, model.norm[...], config.rms_norm_eps), notes


def _alike(config: ModelConfig, layers: list[Any]) -> list[tuple[int, list[Any]]]:
    """Layers in groups that differ in their arrays' values alone, and the first one's number."""

    def kind(pair):
        index, layer = pair
        leaves, structure = jax.tree.flatten(layer)
        return config.windows[index], structure, [(leaf.shape, leaf.dtype) for leaf in leaves]

    groups = []
    for _, pairs in itertools.groupby(enumerate(layers), kind):
        numbers, alike = zip(*pairs, strict=True)
        groups.append((numbers[0], list(alike)))
    return groups


def plain_attention(
    config: ModelConfig,
    index: int,
    q: Float[Array, "B T Hq D"],
    k: Float[Array, "B T Hkv D"],
    v: Float[Array, "B T Hkv D"],
    sinks: Float[Array, " Hq"] | None,
) -> Float[Array, "B T Hq D"]:
    """What layer ``index`` computes of rotated queries and keys."""
    window = config.windows[index]
    if sinks is None and fused_attention_works(q.dtype, *q.shape[1:], k.shape[2], window):
        return fused_attention(q, k, v, config.scale, window)
    order = jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32)[None], q.shape[:2])
    out, lse = causal_attention(q, k, v, order, config.scale, window)
    return add_sinks(out, lse, sinks)


def plain_states(
    model: Decoder, tokens: Int[Array, "B T"], *, remat: bool = False
) -> Float[Array, "B T E"]:
    """Hidden states after the final norm, of the model as it is."""

    def attend(index, module, angles, own, q, k, v, sinks):
        del module, angles, own
        return plain_attention(model.config, index, q, k, v, sinks), None

    beside = (None,) * model.config.num_layers
    return read(model, tokens, attend, beside, keys="rotated", remat=remat)[0]


def _seen(config: ModelConfig, index: int, q: Array) -> tuple[Array, Array]:
    """Which tokens each one sees in layer ``index``, and which of them is itself."""
    order = jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32)[None], q.shape[:2])
    return causal_mask(order, order, config.windows[index]), causal_mask(order, order, 1)


def compressed_states(
    model: Decoder,
    spectra: Spectra,
    bases: tuple[tuple[Basis, Basis], ...],
    tokens: Int[Array, "B T"],
    *,
    mode: Mode,
    sharp: Float[Array, ""] | None = None,
    remat: bool = False,
    first_position: int | Int[Array, ""] = 0,
) -> tuple[Float[Array, "B T E"], Rates]:
    """Hidden states after the final norm, every token reading compressed keys and values.

    Args:
        model: the decoder.
        spectra: its bases and gates.
        bases: ``spectra.bases()``.
        tokens: rows, right-padded: a row's padding is in no token's past.
        mode: which mask is used.
        sharp: with the soft mask, 1 where the hard one is to take its place and leave it the
            gradients, else 0.
        remat: see `read`.
        first_position: see `read`.
    """

    def attend(index, module, angles, own, q, k, v, sinks):
        store = functools.partial(through, mode=mode, sharp=sharp)
        return _attend(model.config, spectra, store, index, module, angles, own, q, k, v, sinks)

    hidden, rates = read(
        model,
        tokens,
        attend,
        list(zip(map(_with_rank, spectra.layers), bases, strict=True)),
        keys=spectra.settings.keys,
        remat=remat,
        first_position=first_position,
    )
    soft, hard = zip(*rates, strict=True)
    return hidden, (jnp.stack(soft), jnp.stack(hard))


def _with_rank(layer: LayerSpectra) -> LayerSpectra:
    """The same with fixed ranks as arrays, so that layers of other ranks are alike."""
    if layer.keys.rank is None:
        return layer
    copy = nnx.merge(*nnx.split(layer))
    for part in (copy.keys, copy.values):
        part.rank = nnx.data(jnp.int32(part.rank))
    return copy


def _attend(
    config: ModelConfig,
    spectra: Spectra,
    store: Callable[..., tuple[Array, Array, Array]],
    index: int,
    module: Attention,
    angles: tuple[Array, Array],
    own: tuple[LayerSpectra, tuple[Basis, Basis]],
    q: Float[Array, "B T Hq D"],
    k: Float[Array, "B T Hkv D"],
    v: Float[Array, "B T Hkv D"],
    sinks: Float[Array, " Hq"] | None,
) -> tuple[Float[Array, "B T Hq D"], tuple[Array, Array]]:
    """Attention over rebuilt keys and values, and the rates of both."""
    layer, (key_basis, value_basis) = own
    raw = spectra.settings.keys == "raw"

    def as_keys(k):
        return rotate(module.norm_keys(k) if raw else k, *angles).astype(q.dtype)

    rebuilt_k, *key_rates = store(layer.keys, key_basis, k)
    rebuilt_v, *value_rates = store(layer.values, value_basis, v)
    rebuilt_k, rebuilt_v = as_keys(rebuilt_k), rebuilt_v.astype(v.dtype)
    if spectra.settings.masks_own:
        out = plain_attention(config, index, q, rebuilt_k, rebuilt_v, sinks)
    else:
        mask, same = _seen(config, index, q)
        past = masked_attention(q, rebuilt_k, rebuilt_v, mask & ~same, config.scale)
        itself = masked_attention(q, as_keys(k), v, same, config.scale)
        out = add_sinks(*merge(*past, *itself), sinks)
    rates = tuple(jnp.stack(pair) for pair in zip(key_rates, value_rates, strict=True))
    return out, rates


def through(
    spectrum: Spectrum,
    basis: Basis,
    x: Float[Array, "B T Hkv D"],
    mode: Mode,
    sharp: Float[Array, ""] | None = None,
) -> tuple[Float[Array, "B T Hkv D"], Float[Array, "B T"], Float[Array, "B T"]]:
    """Keys or values stored and rebuilt, in float32, with each token's soft and hard rate."""
    exact = mode == "hard" or x.dtype == jnp.float32
    latent = spectrum.latent(x.reshape(*x.shape[:2], -1), basis, exact)
    mask = spectrum.mask(latent, exact)
    hard = spectrum.ranks(mask).astype(jnp.float32) / latent.shape[-1]
    if mode == "hard":
        kept = spectrum.stored(latent, mask)
    else:
        used = mask
        if sharp is not None and spectrum.b is not None:
            used += sharp * jax.lax.stop_gradient(spectrum.stored(jnp.ones_like(mask), mask) - mask)
        kept = latent * used
    return spectrum.rebuild(kept, basis, exact).reshape(x.shape), mask.mean(-1), hard
