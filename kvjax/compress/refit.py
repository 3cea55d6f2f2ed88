"""Attention matching on the slots of a layer: what stays takes over from what goes."""

import dataclasses
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.cache import LayerCache
from kvjax.cache.slots import as_stored, compact, revalue
from kvjax.compress.context import Context
from kvjax.matching import AttentionMatching
from pallas_kernels import SCRATCH_PAGE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Change:
    """New values and biases of some slots of a ``Context``.

    Attributes:
        index: the slot.
        real: False where there is no change.
        v: its new value; None where values stay.
        bias: its new bias.
    """

    index: Int[Array, "B Hkv T"]
    real: Bool[Array, "B Hkv T"]
    v: Float[Array, "B Hkv T D"] | None
    bias: Float[Array, "B Hkv T"]


def match(
    compactor: AttentionMatching,
    ctx: Context,
    stay: Bool[Array, "B Hkv S"],
    fixed: Bool[Array, "B Hkv S"],
    most: int,
    stored_k: Float[Array, "B Hkv S D"],
) -> Change:
    """Let the slots that stay take over from those that go; a head that loses none stays as it is.

    Args:
        stay: the slots that stay.
        fixed: those that stay as they are.
        most: slots of a head that stay, at most, where any goes.
        stored_k: keys as they will be stored.
    """
    goes = (ctx.live & ~stay).any(2, keepdims=True)
    fitted = compactor(ctx, stay, fixed | ~goes, most, stored_k)
    changed = fitted.bias != jnp.take_along_axis(ctx.bias, fitted.index, 2)
    if fitted.v is not None:
        old = jnp.take_along_axis(ctx.v, fitted.index[..., None], 2).astype(jnp.float32)
        changed |= (fitted.v != old).any(-1)
    # What is fixed comes back bit for bit, and is not coded once more.
    return Change(fitted.index, fitted.valid & changed, fitted.v, fitted.bias)


def store_change(layer: LayerCache, change: Change) -> LayerCache:
    """Write the changes of the layer's own slots: those of its classes but the first, in order."""
    start = 0
    for c in range(1, len(layer.pools)):
        pool, table = layer.pools[c], layer.tables[c]
        at = change.index - start
        count = table.shape[2] * pool.page_size
        mine = change.real & (at >= 0) & (at < count)
        pages = jnp.take_along_axis(table, at // pool.page_size, 2, mode="clip")
        pages = jnp.where(mine, pages, SCRATCH_PAGE)
        layer = revalue(layer, c, pages, at % pool.page_size, change.v, change.bias)
        start += count
    return layer


def change_tokens(
    change: Change, start: int, v: Float[Array, "B Hkv M D"]
) -> tuple[Float[Array, "B Hkv M D"], Float[Array, "B Hkv M"]]:
    """Values and biases of tokens that are not stored yet, the context's slots from ``start``."""
    rows, heads, tokens, _ = v.shape
    row = jnp.arange(rows, dtype=jnp.int32)[:, None, None]
    head = jnp.arange(heads, dtype=jnp.int32)[None, :, None]
    at = change.index - start
    at = jnp.where(change.real & (at >= 0), at, tokens)
    bias = jnp.zeros(v.shape[:3], jnp.float32).at[row, head, at].set(change.bias, mode="drop")
    if change.v is not None:
        v = v.at[row, head, at].set(change.v.astype(v.dtype), mode="drop")
    return v, bias


def read_classes(
    read: Callable, layer: LayerCache, dtype: DTypeLike, classes: Iterable[int]
) -> list[Float[Array, "B Hkv _ D"]]:
    """Keys or values of some classes, each in the order of its slots.

    Args:
        read: ``plain_keys`` or ``plain_values``.
    """
    found = []
    for c in classes:
        whole = read(layer.pools[c], layer.tables[c], dtype)
        found.append(whole.reshape(*whole.shape[:2], -1, whole.shape[-1]))
    return found


def keys_to_store(
    layer: LayerCache,
    into: Int[Array, "B M"],
    leaves: Bool[Array, "B M"],
    k: Float[Array, "B Hkv M D"],
) -> Float[Array, "B Hkv M D"]:
    """Keys of tokens as their classes will hold them, if they leave the recent window now."""
    found = k
    for c in range(1, len(layer.pools)):
        mine = (leaves & (into == c))[:, None, :, None]
        found = jnp.where(mine, as_stored(layer, c, k).astype(k.dtype), found)
    return found


def tidied(layer: LayerCache, due: Bool[Array, " B"]) -> LayerCache:
    """The layer with the tokens of every class but the first in as few pages as can be.

    Args:
        due: rows to do this in.
    """
    for c in range(1, len(layer.pools)):
        layer = compact(layer, c, due)
    return layer
