"""From scores to the slots that stay."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.compress.context import Context, in_window


def protected(ctx: Context, *, sinks: int, recent: int, prompt: bool) -> Bool[Array, "B Hkv S"]:
    """True at the tokens that stay whatever their score.

    Args:
        ctx: the cache of one layer.
        sinks: how many of the first tokens stay.
        recent: how many of the last tokens stay.
        prompt: whether every token of the prompt stays.
    """
    must = (ctx.pos < sinks) | in_window(ctx, recent)
    if prompt:
        must |= ctx.pos < ctx.prompt[:, None, None]
    return must & ctx.live


def keep_mask(
    scores: Float[Array, "B Hkv S"],
    live: Bool[Array, "B Hkv S"],
    pos: Int[Array, "B Hkv S"],
    must: Bool[Array, "B Hkv S"],
    budget: int | Int[Array, ""] | Int[Array, " B"] | Int[Array, "B Hkv"],
) -> Bool[Array, "B Hkv S"]:
    """The slots of every KV head that stay.

    All live slots of ``must`` stay, even beyond the budget. The rest of the budget goes to the
    highest scores; of equal ones (0 and -0 are equal) the later position stays, and a score of NaN
    loses to every number.

    Args:
        scores: float32, the higher the better; not read where no token is.
        live: where a token is. Nothing else stays.
        pos: logical positions.
        must: where a token stays whatever its score.
        budget: tokens that a KV head may keep, for all rows, for each one or for each of its
            heads. Above the number of live slots, all stay.
    """
    unknown = jnp.isnan(scores)
    must = must & live
    rank_class = jnp.where(live, jnp.where(must, 0, jnp.where(unknown, 2, 1)), 3)
    slot = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
    keys = rank_class, -jnp.where(unknown, 0, scores), -pos
    *_, order = jax.lax.sort((*keys, slot), dimension=2, num_keys=3)
    rank = jnp.put_along_axis(slot, order, slot, axis=2, inplace=False)
    room = jnp.asarray(budget, jnp.int32)
    room = room[:, :, None] if room.ndim == 2 else room.reshape(-1, 1, 1)
    return must | (live & (rank < room))
