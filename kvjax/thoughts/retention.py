"""How much of a segment stays each time that it is demoted, and which of its tokens."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.compress.selectors.random import draws
from kvjax.errors import UsageError
from kvjax.sharding.across import gathered, numbers
from pallas_kernels import cluster_centers

Chooser = Literal["kmeans", "strided", "random", "attention"]


@dataclasses.dataclass(frozen=True)
class Retention:
    """ThinKV's eviction, "Think Before you Evict" (arXiv 2510.01290, section 4.3).

    A segment is demoted by one level when a later thought is a transition, and, over the budget,
    the oldest segment of the least important kind is demoted until the rest fits. At level ``n`` it
    holds ``schedule[n - 1]`` tokens. Which ones is settled once, when the segment has left the
    recent window in whole: every level chooses among the tokens of the level before it, so that a
    token needs to know only how many demotions it survives.

    Attributes:
        schedule: tokens left after the first, second, ... demotion. The last entry is the floor.
        chooser: "kmeans" clusters the keys as they are stored and keeps, of each cluster, the token
            nearest to its center; "strided" keeps evenly spaced tokens, "random" any, "attention"
            those that the last queries attend to most.
        shared: one set of tokens for all KV heads of a layer, chosen by all their keys; else each
            head has its own.
        iterations: of K-means (Lloyd's), from evenly spaced tokens.
        at: whether a transition demotes when it begins (as soon as its kind is known) or when it
            ends.
        repeated: whether of several transitions in a row each demotes, or the first alone.
        itself: whether a transition's own segment is demoted with those before it.
        forget: whether a token is masked once it is evicted; else it is attended until its slot or
            page is used again.
        observed: last queries that "attention" asks.
    """

    schedule: tuple[int, ...] = (64, 32, 16, 8, 4)
    chooser: Chooser = "kmeans"
    shared: bool = False
    iterations: int = 4
    at: Literal["start", "end"] = "start"
    repeated: bool = True
    itself: bool = False
    forget: bool = True
    observed: int = 16

    def __post_init__(self):
        falling = all(a > b for a, b in zip(self.schedule, self.schedule[1:], strict=False))
        if not self.schedule or not falling or self.schedule[-1] < 0 or len(self.schedule) > 64:
            raise UsageError(
                f"schedule must be numbers of tokens that fall, as 64,32,16,8,4, "
                f"got {','.join(map(str, self.schedule))}"
            )
        if self.chooser not in ("kmeans", "strided", "random", "attention"):
            raise UsageError(
                f"chooser must be kmeans, strided, random or attention, got {self.chooser!r}"
            )
        if self.at not in ("start", "end"):
            raise UsageError(f"at must be start or end, got {self.at!r}")
        for name, least in (("iterations", 0), ("observed", 1)):
            if (value := getattr(self, name)) < least:
                raise UsageError(f"{name} must be at least {least}, got {value}")

    @property
    def needs_queries(self) -> int:
        return self.observed if self.chooser == "attention" else 0

    def sizes(self, every: int) -> tuple[int, ...]:
        """Tokens of a segment at each level, 0 demotions first."""
        return (every, *(min(count, every) for count in self.schedule))


def survivals(
    retention: Retention,
    keys: Float[Array, "B Hkv T D"],
    scores: Float[Array, "B Hkv T"] | None,
    pos: Int[Array, "B T"],
    seed: Int[Array, ""],
    layer: Int[Array, ""],
) -> Int[Array, "B Hkv T"]:
    """How many demotions each token of a segment survives.

    Args:
        keys: of the segment's tokens in their order, as they are stored, with rotary positions.
        scores: attention of each token, for the chooser "attention".
        pos: logical positions.
        seed: for the chooser "random".
        layer: index of the layer, likewise.
    """
    rows, heads, tokens, _ = keys.shape
    if retention.shared:
        keys = gathered(keys, axis=1)
        scores = None if scores is None else gathered(scores, axis=1)
        keys = keys.swapaxes(1, 2).reshape(rows, 1, tokens, -1)
        scores = None if scores is None else scores.mean(1, keepdims=True)
    if retention.chooser == "random":
        head = jnp.zeros(1, jnp.int32) if retention.shared else numbers(keys.shape[1])
        head = head[None, :, None]
        scores = draws(seed, layer, head, pos[:, None])
        scores = jnp.broadcast_to(scores, keys.shape[:3])
    alive = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), keys.shape[:3])
    survived = jnp.zeros(keys.shape[:3], jnp.int32)
    for level, count in enumerate(retention.schedule, 1):
        if count < alive.shape[2]:
            chosen = _choose(retention, keys, scores, count)
            alive = jnp.take_along_axis(alive, chosen, 2)
            keys = jnp.take_along_axis(keys, chosen[..., None], 2)
            if scores is not None:
                scores = jnp.take_along_axis(scores, chosen, 2)
        survived = jnp.put_along_axis(survived, alive, jnp.int32(level), 2, inplace=False)
    return jnp.broadcast_to(survived, (rows, heads, tokens))


def _choose(
    retention: Retention,
    keys: Float[Array, "B H T D"],
    scores: Float[Array, "B H T"] | None,
    count: int,
) -> Int[Array, "B H count"]:
    """Indices of ``count`` tokens, in their order."""
    if retention.chooser == "strided":
        chosen = evenly(keys.shape[2], count)
        return jnp.broadcast_to(chosen, (*keys.shape[:2], count))
    if retention.chooser == "kmeans":
        near, distance = cluster_centers(keys, evenly(keys.shape[2], count), retention.iterations)
        # A cluster without members leaves its place to the token that is farthest from its center.
        scores = jnp.where(near, jnp.inf, distance)
    return highest(scores, count)


def highest(scores: Float[Array, "B H T"], count: int) -> Int[Array, "B H count"]:
    """Indices of the highest scores, in the order of tokens; of equal ones the earlier stay."""
    order = jnp.argsort(scores, axis=2, descending=True, stable=True)
    return jnp.sort(order[..., :count], 2)


def evenly(tokens: int, count: int) -> Int[Array, " count"]:
    """``count`` of so many indices, evenly spaced."""
    return jnp.asarray([(2 * i + 1) * tokens // (2 * count) for i in range(count)], jnp.int32)
