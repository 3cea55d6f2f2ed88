"""Orthogonal matching pursuit: keys one after the other, where most mass is still missing."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.matching.least_squares import JITTER, product

BOUNDS = 1e-12, math.exp(7)
"""Of the weights while keys are looked for."""
ROUNDS = 3
"""How often keys that turn out to be worth nothing are replaced, at most."""


def omp(
    masses: Float[Array, "n S"],
    mass: Float[Array, " n"],
    candidates: Bool[Array, " S"],
    total: Int[Array, ""],
    count: int,
    schedule: tuple[tuple[int, int, int], ...] = ((0, 1, 1),),
    cutoff: float | None = -7.0,
) -> Int[Array, " S"]:
    """The place of every key in the order in which a greedy search finds them.

    With ``r = mass - masses_S w`` what the keys ``S`` found so far miss, the next ones are those
    with the highest ``sum over i of masses_ij r_i``; ``w`` is found anew by least squares, clamped
    to ``BOUNDS``. The factor of the normal equations grows by a row with every key.

    Args:
        masses: float32 ``exp(logit - shift)``, zero where a query does not see a slot.
        mass: what is to be matched: their sum over some of the slots.
        candidates: slots that may be picked.
        total: how many are wanted, at most ``count``.
        count: how many are picked. Without a cutoff, any number of the first are what would be
            found if that many were wanted.
        schedule: ``(keys found, k, tau)``: from so many keys on, ``k`` are taken at a time, and
            the weights are found anew after every ``tau`` times; between, new ones have none.
        cutoff: keys among the first ``total`` whose weight is below ``exp(cutoff)`` make way for
            others and do not come back; None: all stay.

    Returns:
        int32 places from 0; ``S`` for what is not picked.
    """
    slots = len(candidates)
    # No key is too much like those before it, but by rounding.
    jitter = jnp.maximum(JITTER * (masses**2).sum(), 1e-30)
    anew, refit = _events(schedule, count)

    def pick(i, state, anew, refit):
        open_, order, columns, factor, weights, worth = state
        rest = mass - product(columns, weights[:, None])[:, 0]
        worth = jnp.where(anew, product(masses.T, rest[:, None])[:, 0], worth)
        key = jnp.where(open_, worth, -jnp.inf).argmax()
        there = open_[key]
        column = jnp.where(there, masses[:, key], 0)
        row = _lower(factor, product(columns.T, column[:, None]))[:, 0]
        left = (column**2).sum() + jitter - (row**2).sum()
        row = row.at[i].set(jnp.where(there, jnp.sqrt(jnp.maximum(left, jitter)), 1))
        columns, factor = columns.at[:, i].set(column), factor.at[i].set(row)
        order = order.at[i].set(jnp.where(there, key, slots).astype(jnp.int32))
        weights = weights.at[i].set(BOUNDS[0])
        weights = jnp.where(refit, _weights(factor, columns, mass), weights)
        return open_.at[key].set(False), order, columns, factor, weights, worth

    def replace(carry):
        rounds, _, state = carry
        open_, order, columns, factor, _, worth = state
        place = jnp.arange(count, dtype=jnp.int32)
        wanted = place < total
        columns = jnp.where(wanted[None], columns, 0)
        weights = _weights(_factor(columns, jitter), columns, mass)
        poor = wanted & (order < slots) & (weights < math.exp(cutoff))
        good = wanted & (order < slots) & ~poor
        # Those beyond the wanted ones may be picked again.
        open_ = open_.at[jnp.where(wanted, slots, order)].set(True, mode="drop")
        first = jnp.argsort(~good, stable=True)
        columns = jnp.where(good[first][None], columns[:, first], 0)
        order = jnp.where(good[first], order[first], slots)
        factor = _factor(columns, jitter)
        weights = _weights(factor, columns, mass)
        state = jax.lax.fori_loop(
            good.sum(dtype=jnp.int32),
            total,
            lambda i, state: pick(i, state, True, True),
            (open_, order, columns, factor, weights, worth),
        )
        return rounds + 1, poor.any(), state

    state = (
        candidates,
        jnp.full(count, slots, jnp.int32),
        jnp.zeros((len(mass), count), jnp.float32),
        jnp.eye(count, dtype=jnp.float32),
        jnp.zeros(count, jnp.float32),
        jnp.zeros(slots, jnp.float32),
    )
    state = jax.lax.fori_loop(0, count, lambda i, state: pick(i, state, anew[i], refit[i]), state)
    if cutoff is not None:
        start = jnp.int32(0), jnp.bool_(True), state
        _, _, state = jax.lax.while_loop(lambda c: c[1] & (c[0] < ROUNDS), replace, start)
    place = jnp.arange(count, dtype=jnp.int32)
    return jnp.full(slots, slots, jnp.int32).at[state[1]].set(place, mode="drop")


def _weights(factor, columns, mass):
    half = _lower(factor, product(columns.T, mass[:, None]))
    return jnp.clip(_lower(factor, half, transposed=1)[:, 0], *BOUNDS)


def _lower(factor, b, transposed=0):
    return jax.scipy.linalg.solve_triangular(factor, b, lower=True, trans=transposed)


def _factor(columns, jitter):
    gram = product(columns.T, columns)
    return jnp.linalg.cholesky(gram + jnp.diag(jnp.where(jnp.diag(gram) > 0, jitter, 1)))


def _events(schedule, count):
    """At which picks the missing mass is looked at again, and after which weights are found."""
    anew, refit = np.zeros(count, bool), np.zeros(count, bool)
    i, since = 0, 0
    while i < count:
        _, k, tau = [stage for stage in schedule if stage[0] <= i][-1]
        anew[i] = True
        i, since = i + k, since + 1
        if since >= tau:
            refit[min(i, count) - 1], since = True, 0
    return jnp.asarray(anew), jnp.asarray(refit)
