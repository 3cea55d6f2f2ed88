"""What selectors ask the decoder for: the last queries, and attention received; and the positions
at which a query sees a class."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import LayerCache
from kvjax.compress.policy import Policy
from kvjax.models.attention import causal_mask
from kvjax.models.config import ModelConfig
from kvjax.models.rope import inverse_frequencies, rotate
from pallas_kernels.einsum import einsum_float32
from pallas_kernels.read import plain_keys


def remember(
    layer: LayerCache,
    q: Float[Array, "B T Hq D"],
    pos: Int[Array, "B T"],
    keep: Bool[Array, "B T"],
) -> LayerCache:
    """Keep the last queries, where the layer has room for any; padding is not kept."""
    if layer.queries is None:
        return layer
    count = layer.queries.shape[1]
    last = jnp.where(keep, pos, -1).max(1)
    keep = keep & (pos > (last - count)[:, None])
    row = jnp.arange(len(q), dtype=jnp.int32)[:, None]
    where = jnp.where(keep, pos % count, count)
    return dataclasses.replace(layer, queries=layer.queries.at[row, where].set(q, mode="drop"))


def note_mass(
    layer: LayerCache,
    tables: list[Int[Array, "B Hkv _"]],
    mass: tuple[Float[Array, "B Hkv _"], ...],
    active: Bool[Array, " B"],
) -> LayerCache:
    """Add the attention that one query gave to each slot of the named pages."""
    pools = []
    for pool, table, new in zip(layer.pools, tables, mass, strict=True):
        # The scratch page is named many times, and gets nothing each time.
        new = jnp.where(active[:, None, None], new, 0).reshape(*table.shape, pool.page_size)
        pools.append(dataclasses.replace(pool, mass=pool.mass.at[table].add(new)))
    return dataclasses.replace(layer, pools=tuple(pools))


def prefill_mass(
    layer: LayerCache,
    q: Float[Array, "B T Hq D"],
    k: Float[Array, "B T Hkv D"],
    pos: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    lse: Float[Array, "B T Hq"],
    scale: float,
    window: int | None,
) -> tuple[LayerCache, Float[Array, "B Hkv T"]]:
    """Note what a chunk's queries gave to the slots before it; returns what they gave to the chunk.

    Args:
        lse: log-sum-exp of each query's whole softmax.
    """
    kv_heads = k.shape[2]
    grouped = (*q.shape[:2], kv_heads, -1)
    queries = q.reshape(*grouped, q.shape[3])
    norm = jnp.moveaxis(lse.reshape(grouped), 1, 3)[..., None]  # [B, Hkv, G, T, 1]

    def given(keys, seen, bias):
        """Attention summed over queries and group: keys [B,Hkv,S,D], seen [B,Hkv,T,S]."""
        dots = einsum_float32("bthgd,bhsd->bhgts", queries, keys) * scale
        seen = (seen & real[:, None, :, None])[:, :, None]
        weights = jnp.exp(jnp.where(seen, dots + bias[:, :, None, None] - norm, -jnp.inf))
        return weights.sum((2, 3))

    pools = []
    for pool, table in zip(layer.pools, layer.tables, strict=True):
        keys = plain_keys(pool, table, q.dtype).reshape(len(q), kv_heads, -1, q.shape[3])
        bias = pool.bias[table].reshape(keys.shape[:3])
        far = pos[:, None, :, None] - pool.pos[table].reshape(keys.shape[:3])[:, :, None]
        seen = (bias > -jnp.inf)[:, :, None] & ((far < window) if window else (far > -1))
        mass = given(keys, seen, jnp.where(bias > -jnp.inf, bias, 0.0))
        mass = mass.reshape(*table.shape, pool.page_size)
        pools.append(dataclasses.replace(pool, mass=pool.mass.at[table].add(mass)))
    seen = causal_mask(pos, pos, window)[:, None]
    mass = given(k.swapaxes(1, 2), seen, jnp.zeros((len(q), kv_heads, k.shape[1]), jnp.float32))
    return dataclasses.replace(layer, pools=tuple(pools)), mass


def shifted(
    policy: Policy,
    config: ModelConfig,
    layer: LayerCache,
    q: Float[Array, "B T Hq D"],
    length: Int[Array, " B"],
) -> list[Float[Array, "B T Hq D"]]:
    """The query as each class of the layer sees it.

    Positions are the tokens' own, but for the first tokens' class with contiguous positions: it
    is seen as if the evicted tokens between it and the rest had never been. Turning the query back
    by their number does the same as moving the keys, which stay as they are.
    """
    if not policy.first:
        return [q] * len(layer.pools)
    oldest = length
    for pool, table in zip(layer.pools, layer.tables, strict=True):
        if pool is layer.pools[1]:
            continue
        pos = pool.pos[table[:, 0]].reshape(len(q), -1)
        oldest = jnp.minimum(oldest, jnp.where(pos < 0, length[:, None], pos).min(1))
    gap = jnp.maximum(oldest - policy.first, 0)
    frequencies, _ = inverse_frequencies(config.rope, config.head_dim)
    angles = -gap.astype(jnp.float32)[:, None, None] * jnp.asarray(frequencies)[None, None]
    angles = jnp.broadcast_to(angles, (*q.shape[:2], angles.shape[2]))
    turned = rotate(q, jnp.cos(angles), jnp.sin(angles))
    return [turned if i == 1 else q for i in range(len(layer.pools))]
