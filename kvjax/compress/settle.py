"""From the recent window into pages: what leaves it is selected, coded and stored."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.cache import LayerCache
from kvjax.cache.slots import append, evict, reserve_layer, store
from kvjax.compress.latents import latent_selection
from kvjax.compress.policy import Policy, group
from kvjax.compress.refit import change_tokens, store_change, tidied
from kvjax.compress.selection import Candidates, Rows, in_window, selection
from kvjax.dynakv.cached import in_blocks
from kvjax.recipes import Recipe
from kvjax.sharding.across import here_once
from kvjax.thoughts.state import Thoughts
from pallas_kernels import SCRATCH_PAGE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Incoming:
    """Tokens that have been read and are not in the cache yet; position ``before + i`` each."""

    k: Float[Array, "B T Hkv D"]
    v: Float[Array, "B T Hkv Dv"]
    mass: Float[Array, "B Hkv T"] | None = None


def leaving(
    recipe: Recipe,
    of_layer: tuple[Policy, ...],
    stored: Int[Array, " B"],
    length: Int[Array, " B"],
    prompt: Int[Array, " B"],
) -> Int[Array, " B"]:
    """The position below which tokens leave the recent window: whole groups of them.

    Where thoughts are told apart, the answer's groups are counted from its start, and a segment
    whose kind is found at its end leaves in whole. Tokens that leave at once are cut into groups
    from the first one on, so the answer's leave after the prompt's last ones, and not with them.
    """
    together = group(of_layer)
    below = jnp.maximum(length - recipe.window, 0)
    if recipe.segmenter is None:
        return jnp.maximum(stored, below // together * together)
    if recipe.segmenter.covers == "past":
        together = recipe.segmenter.every
    answered = jnp.maximum(below - prompt, 0) // together * together
    if together > 1:
        answered = jnp.where(stored < prompt, 0, answered)
    return jnp.maximum(stored, jnp.minimum(below, prompt) + answered)


def settle(
    layer: LayerCache,
    index: Int[Array, ""] | int,
    recipe: Recipe,
    policy: Policy,
    scale: float,
    window: int | None,
    rows: Rows,
    incoming: Incoming | None = None,
    *,
    select: bool = True,
    thoughts: Thoughts | None = None,
    classes: tuple[int, ...] | None = None,
    asked: Float[Array, "B N Hq D"] | None = None,
) -> tuple[LayerCache, Int[Array, " B"]]:
    """Move one layer's tokens out of the recent window, and evict what is not worth its slot.

    Selection comes before storing, so that nothing is coded in vain.

    Args:
        layer: the cache of layer ``index``.
        scale: of the model's attention logits.
        window: of the layer's attention, None if it has none.
        incoming: tokens of a prompt, if one is being read.
        select: False only moves tokens.
        thoughts: of an answer, where they are told apart.
        asked: queries to select by, instead of the last ones.
        classes: the only ones that tokens can go to now, if that is known.

    Returns:
        The layer, and how many tokens of each row found no slot.
    """
    together = group((policy,))
    pos, k, v, mass = _candidates(layer, rows, incoming, together)
    there = pos < rows.length[:, None]
    keep = jnp.broadcast_to(there[:, None], k.shape[:3])
    into = _classes(policy, pos, rows.prompt, recipe, thoughts)
    leaves, bias = pos < rows.leaving[:, None], None
    selects = select and policy.keeps == "budget" and recipe.selector is not None
    kept = []
    if policy.keeps == "window":
        kept, keep = in_window(layer, rows, window, pos, keep)
    elif selects and layer.coder is not None:
        kept, keep = latent_selection(layer, index, recipe, policy.config, rows, pos, k, keep)
    elif selects:
        there = Candidates(pos, k, v, keep, mass, into, leaves)
        kept, keep, change = selection(
            layer, index, recipe, scale, rows, there, policy.budgets, asked
        )
        if change is not None:
            layer = store_change(layer, change)
            v, bias = change_tokens(change, sum(mask[0, 0].size for mask in kept), v)
    layer = _evict(layer, kept)
    out = keep & leaves[:, None]
    leave = k.shape[2]
    if incoming is None:  # at least the recent window stays; groups are coded whole
        leave = -(-(leave - recipe.window) // together) * together
    tokens = [x if x is None else x[:, :, :leave] for x in (k, v, mass, bias, out)]
    if layer.coder is not None:
        k, out = in_blocks(layer, 1, tokens[0], tokens[-1])
        tokens = [k, jnp.zeros((*k.shape[:3], 0), k.dtype), None, None, out]
    places = classes or tuple(range(1, len(layer.pools)))
    layer, crowded = _place(layer, places, into[:, :leave], pos[:, :leave], *tokens)
    if layer.coder is not None:  # the same ones on all devices
        crowded = here_once(crowded)
    if recipe.once and incoming is None and select:
        layer = tidied(layer, rows.select)  # nothing else will take the slots that have come free
    return _renew(layer, rows, incoming), crowded


def _place(layer, places, into, pos, k, v, mass, bias, out):
    """Store tokens in their classes, and count those that find no slot there."""
    crowded = jnp.zeros(len(pos), jnp.int32)
    for c in places:
        mine = out & (into == c)[:, None]
        layer, placed = store(layer, c, k, v, pos, mine, mass, bias)
        crowded += (mine & ~placed).sum((1, 2), dtype=jnp.int32)
    return layer, crowded


def _candidates(layer: LayerCache, rows: Rows, incoming: Incoming | None, together: int):
    """The tokens from ``rows.stored`` on in order: those in the first class, then incoming ones.

    So many that groups of ``together`` are whole: padding fills the last one.
    """
    pool, table = layer.pools[0], layer.tables[0]
    heads, capacity, dim = table.shape[1], table.shape[2] * pool.page_size, pool.k.shape[2]
    k = pool.k[table].reshape(len(table), heads, capacity, dim)
    v = pool.v[table].swapaxes(-1, -2).reshape(*k.shape[:3], pool.v.shape[1])
    mass = None if pool.mass is None else pool.mass[table].reshape(k.shape[:3])
    count = capacity
    if incoming is not None:
        k, v = (
            jnp.concatenate([old, new.swapaxes(1, 2).astype(old.dtype)], 2)
            for old, new in ((k, incoming.k), (v, incoming.v))
        )
        if mass is not None:
            mass = jnp.concatenate([mass, incoming.mass], 2)
        count += incoming.k.shape[1]
    whole = -(-count // together) * together
    pos = rows.stored[:, None] + jnp.arange(whole, dtype=jnp.int32)[None]
    new = capacity + pos - rows.before[:, None]
    place = jnp.where(pos < rows.before[:, None], pos % capacity, new)
    at = jnp.clip(place, 0, count - 1)[:, None]
    # Beyond the end lies padding, and a NaN there must not reach the scratch page.
    there = (pos < rows.length[:, None])[:, None, :, None]
    k, v = (jnp.where(there, jnp.take_along_axis(x, at[..., None], 2), 0) for x in (k, v))
    return pos, k, v, None if mass is None else jnp.take_along_axis(mass, at, 2)


def _evict(layer: LayerCache, kept: list[Bool[Array, "B Hkv _ page"]]) -> LayerCache:
    for c, mask in enumerate(kept, 1):
        layer = evict(layer, c, mask)
    return layer


def _classes(
    policy: Policy,
    pos: Int[Array, "B M"],
    prompt: Int[Array, " B"],
    recipe: Recipe,
    thoughts: Thoughts | None,
) -> Int[Array, "B M"]:
    """The class that each token goes to."""
    into = jnp.full(pos.shape, policy.of_kind[0], jnp.int32)
    if thoughts is not None:
        segment = (pos - prompt[:, None]) // recipe.segmenter.every
        at = jnp.clip(segment, 0, thoughts.kind.shape[1] - 1)
        kind = jnp.take_along_axis(thoughts.kind, at, 1)
        into = jnp.asarray(policy.of_kind, jnp.int32)[jnp.maximum(kind, 0)]
    into = jnp.where(pos < prompt[:, None], policy.of_prompt, into)
    return jnp.where(pos < policy.first, 1, into)


def _renew(layer: LayerCache, rows: Rows, incoming: Incoming | None) -> LayerCache:
    """Let the first class hold what has not left it, and nothing else."""
    pool, table = layer.pools[0], layer.tables[0]
    stay = (pool.pos[table] >= rows.leaving[:, None, None, None]) & (table != SCRATCH_PAGE)[
        ..., None
    ]
    layer = evict(layer, 0, stay)
    if incoming is None:
        return layer
    layer = reserve_layer(layer, rows.length)
    count = incoming.k.shape[1]
    pos = rows.before[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    recent = (pos >= rows.leaving[:, None]) & (pos < rows.length[:, None])
    return append(layer, incoming.k, incoming.v, pos, recent, incoming.mass)
