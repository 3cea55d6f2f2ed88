"""Which heads keep how much: ranks for a mean rate."""

import math
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.errors import NumericalError
from kvjax.models.decoder import Decoder
from kvjax.train.matryoshka.projections import LEVELS, Projections, truncated_states
from kvjax.train.matryoshka.update import compared


def sweeps(
    cost: Callable[[Int[np.ndarray, " C"]], Float[np.ndarray, " C"]],
    candidates: int,
    path: Sequence[int],
    length: int,
    drops: int,
) -> Iterator[list[int]]:
    """Lower levels one after the other, always those that cost least.

    A candidate is the keys, or the values, of one head of one layer. All begin at level `LEVELS`
    and end at 1 at the least. With one drop a sweep this is the algorithm of the paper's figure;
    its code lowers many at once, each candidate by one, and judges by another measure.

    Args:
        cost: of each candidate, what the model loses if it alone goes a level down from here.
        candidates: how many there are.
        path: drops so far.
        length: drops wanted; the last sweep, which is made whole, may exceed it.
        drops: in one sweep.

    Yields:
        All drops so far, after each sweep. Whatever length is wanted, a shorter path is a prefix.

    Raises:
        NumericalError: a cost is no number.
    """
    path = list(path)
    while len(path) < length:
        levels = levels_after(path, candidates)
        costs = cost(levels)
        if not np.isfinite(costs[levels > 1]).all():
            raise NumericalError("a divergence is not finite: ranks cannot be searched")
        order = np.argsort(np.where(levels > 1, costs, np.inf), kind="stable")
        path += order[: min(drops, int((levels > 1).sum()))].tolist()
        yield list(path)


def levels_after(path: Sequence[int], candidates: int) -> Int[np.ndarray, " C"]:
    """Each candidate's level when these drops were made."""
    return LEVELS - np.bincount(np.array(path, int), minlength=candidates)


def drops_to(rate: float, candidates: int) -> int:
    """Drops after which the mean rate is no longer above ``rate``."""
    return math.ceil(candidates * LEVELS * (1 - rate) - 1e-6)


def uniform(rate: float, head_dim: int, shape: tuple[int, ...]) -> Int[np.ndarray, "L 2 H"]:
    """The same rank for all, the nearest there is."""
    return np.full(shape, max(1, round(rate * head_dim)), np.int32)


def costs_of(
    model: Decoder,
    projections: Projections,
    teacher: Float[Array, "M B T E"],
    tokens: Int[Array, "M B T"],
    valid: Bool[Array, "M B T"],
) -> Callable[[Int[np.ndarray, " C"]], Float[np.ndarray, " C"]]:
    """The mean divergence from the model as it is, for `sweeps`.

    One sweep reads all batches once for each candidate. They are tried by layers, whose candidates
    share one program.

    Args:
        model: the decoder.
        projections: of all its heads.
        teacher: the final states of the model as it is.
        tokens: batches of rows.
        valid: false where a row is padded.
    """
    shape = projections.mean.shape[:-1]
    step = projections.mean.shape[-1] // LEVELS

    def cost(levels: Int[np.ndarray, " C"]) -> Float[np.ndarray, " C"]:
        # One row a candidate. At the lowest level there is none to drop, and the cost is not used.
        lower = np.maximum(levels[None] - np.eye(len(levels), dtype=int), 1)
        choices = (step * lower).astype(np.int32).reshape(shape[0], -1, *shape)
        found = [divergences(model, projections, one, teacher, tokens, valid) for one in choices]
        return np.concatenate(jax.device_get(found)).astype(np.float64)

    return cost


@jax.jit
def divergences(
    model: Decoder,
    projections: Projections,
    choices: Int[Array, "C L 2 H"],
    teacher: Float[Array, "M B T E"],
    tokens: Int[Array, "M B T"],
    valid: Bool[Array, "M B T"],
) -> Float[Array, " C"]:
    """KL(model as it is || truncated), nats a token, for each choice of ranks."""

    def of_ranks(ranks):
        def of_batch(batch):
            teacher, tokens, valid = batch
            hidden = truncated_states(model, projections, ranks, tokens)
            return compared(model, hidden, teacher, tokens, valid)

        sums = jax.lax.map(of_batch, (teacher, tokens, valid))
        return sums.nats[:, 0].sum() / sums.predicted.sum()

    return jax.lax.map(of_ranks, choices)
