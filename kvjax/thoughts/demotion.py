"""When segments are demoted: at transitions, and for the budget. All of it row by row."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.thoughts.retention import Retention
from kvjax.thoughts.segmenters import Segmenter
from kvjax.thoughts.state import TRANSITION, Thoughts


def refresh(
    thoughts: Thoughts,
    segmenter: Segmenter,
    retention: Retention | None,
    sparsity: Float[Array, " B"],
    answered: Int[Array, " B"],
    active: Bool[Array, " B"],
    evicts: Bool[Array, " B"],
) -> Thoughts:
    """Find the kind of a segment in the rows that are at a border, and demote after transitions.

    Args:
        sparsity: of each row's last token.
        answered: tokens of each row's answer that have been read.
        active: rows that still run.
        evicts: rows whose segments may be demoted.
    """
    number = answered // segmenter.every - int(segmenter.covers == "past")
    due = active & (answered % segmenter.every == 0) & (number >= 0)
    segment = jnp.arange(thoughts.kind.shape[1], dtype=jnp.int32)[None]
    here = due[:, None] & (segment == number[:, None])
    kind = jnp.where(here, segmenter(sparsity, number)[:, None], thoughts.kind)
    thoughts = dataclasses.replace(
        thoughts,
        kind=kind,
        sparsity=jnp.where(here, sparsity[:, None], thoughts.sparsity),
    )
    if retention is None:
        return thoughts
    begins = retention.at == "start" or segmenter.covers == "past"
    turn = number if begins else number - 1
    fires = due & evicts & _is_transition(kind, turn)
    if not retention.repeated:
        fires &= ~_is_transition(kind, turn - 1)
    before = turn + int(retention.itself)
    last = len(retention.schedule)
    falls = fires[:, None] & (segment < before[:, None]) & (thoughts.level < last)
    count = falls.sum(1, dtype=jnp.int32)
    return dataclasses.replace(
        thoughts,
        level=thoughts.level + falls.astype(jnp.int32),
        demoted=thoughts.demoted.at[:, 0].add(count),
    )


def make_fit(
    thoughts: Thoughts,
    every: int,
    retention: Retention,
    closed: Int[Array, " B"],
    budget: Int[Array, " B"],
) -> Thoughts:
    """Demote segments until the closed ones hold no more tokens than the budget.

    Each time the least important kind's oldest segment that can still shrink falls by one level:
    transitions before execution before reasoning.

    Args:
        every: tokens of a segment.
        closed: segments of each row that are complete; a growing one is not touched.
        budget: tokens a KV head. Where even the floor takes more, all closed ones end there.
    """
    sizes = jnp.asarray(retention.sizes(every), jnp.int32)
    last = len(retention.schedule)
    segment = jnp.arange(thoughts.kind.shape[1], dtype=jnp.int32)[None]
    complete = segment < closed[:, None]
    able = complete & (thoughts.level < last)
    takes = sizes[thoughts.level]
    over = jnp.where(complete, takes, 0).sum(1) - budget
    # One falls as far as it can before the next one does. So what is still over the budget at its
    # turn is known without going from one to the other: a loop whose turns only the device knows
    # would hold the host until all that was launched before is done.
    # Importance is R > E > T, the order of the kinds themselves.
    turn = jnp.argsort((TRANSITION - thoughts.kind) * segment.shape[1] + segment, 1)
    frees = jnp.take_along_axis(jnp.where(able, takes - sizes[last], 0), turn, 1)
    before = jnp.cumsum(frees, 1, dtype=jnp.int32) - frees
    row = jnp.arange(len(closed), dtype=jnp.int32)[:, None]
    left = over[:, None] - jnp.zeros_like(before).at[row, turn].set(before, unique_indices=True)
    enough = takes[..., None] - sizes[None, None] >= left[..., None]  # [B, S, levels]
    to = jnp.where(enough.any(2), enough.argmax(2), last).astype(jnp.int32)
    level = jnp.where(able & (left > 0), to, thoughts.level)
    count = thoughts.demoted[:, 1] + (level - thoughts.level).sum(1, dtype=jnp.int32)
    return dataclasses.replace(thoughts, level=level, demoted=thoughts.demoted.at[:, 1].set(count))


def _is_transition(kind: Int[Array, "B S"], segment: Int[Array, " B"]) -> Bool[Array, " B"]:
    at = jnp.clip(segment, 0, kind.shape[1] - 1)[:, None]
    return (segment >= 0) & (jnp.take_along_axis(kind, at, 1)[:, 0] == TRANSITION)
