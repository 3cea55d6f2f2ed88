"""Batches of problems: what step they belong to decides all of them."""

import collections
import concurrent.futures
import dataclasses
import math
import multiprocessing
import random
import signal
from collections.abc import Iterator, Sequence

import numpy as np

from kvjax.train.reasoner.task import WIDTHS, problem

LEVELS = tuple(WIDTHS)
_MIX = (
    (0.09, (0.6, 0.4, 0.0, 0.0, 0.0)),
    (0.27, (0.15, 0.35, 0.5, 0.0, 0.0)),
    (1.0, (0.05, 0.1, 0.35, 0.3, 0.2)),
)
"""Up to which share of the training, how often each level is trained."""
_HIDING = (0.25, 0.45)
"""Shares of the training at which rows begin to be hidden from, and at which most are."""
_HIDDEN, _LEAST = 0.65, 0.25
"""The share of the rows that lose tokens in the end, and the smallest budget's share of a trace."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Problems of one level, one a row.

    Attributes:
        tokens: int16 [B, T], padded with `vocabulary.PAD`.
        prompt: int32 [B], tokens of the prompt.
        length: int32 [B], tokens of prompt and trace.
        share: float32 [B]; rough: float32 [B]; together: float32 [B]: see `hiding.Hiding`.
    """

    tokens: np.ndarray
    prompt: np.ndarray
    length: np.ndarray
    share: np.ndarray
    rough: np.ndarray
    together: np.ndarray


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a training's batches come from.

    Attributes:
        steps: of the whole training.
        tokens: of a batch, padding included, about.
        seed: of everything.
        levels: that are trained.
    """

    steps: int
    tokens: int
    seed: int = 0
    levels: tuple[int, ...] = LEVELS

    def rows(self, level: int) -> int:
        """Rows of a batch."""
        return max(self.tokens // WIDTHS[level], 1)

    def level(self, step: int) -> int:
        """What the step trains."""
        weights = mix(step / self.steps, self.levels)
        return self._rng(step, "level").choices(self.levels, weights)[0]

    def batch(self, step: int) -> Batch:
        level = self.level(step)
        rows, rng = self.rows(level), self._rng(step, "hiding")
        start, end = _HIDING
        ramp = min(max((step / self.steps - start) / (end - start), 0.0), 1.0)
        share, rough, together = np.full(rows, np.inf), np.zeros(rows), np.zeros(rows)
        for row in range(rows):
            if rng.random() < _HIDDEN * ramp:
                share[row] = math.exp(rng.uniform(math.log(_LEAST), 0.0))
                rough[row] = rng.uniform(0.3, 0.8) if rng.random() < 0.5 else 0.0
                together[row] = rng.random() < 0.2
        tokens, prompt, length = read(level, step * rows, rows, split="train", seed=self.seed)
        return Batch(tokens, prompt, length, *map(np.float32, (share, rough, together)))

    def batches(self, start: int, workers: int) -> Iterator[Batch]:
        """The batches from step ``start`` on, made by so many processes (0: by this one)."""
        steps = range(start, self.steps)
        if not workers:
            yield from map(self.batch, steps)
            return
        context = multiprocessing.get_context("spawn")  # a fork would copy JAX's threads half
        ignored = signal.SIGINT, signal.SIG_IGN  # Ctrl-C is for the training to answer
        with concurrent.futures.ProcessPoolExecutor(
            workers, context, initializer=signal.signal, initargs=ignored
        ) as pool:
            waiting = collections.deque()
            try:
                for step in steps:
                    waiting.append(pool.submit(self.batch, step))
                    if len(waiting) > 4 * workers:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _rng(self, step: int, what: str) -> random.Random:
        return random.Random(f"{self.seed}/{what}/{step}")


def mix(progress: float, levels: Sequence[int] = LEVELS) -> list[float]:
    """How often each level is trained after this share of the steps."""
    weights = next(weights for until, weights in _MIX if progress < until or until == 1.0)
    own = [weight for level, weight in zip(LEVELS, weights, strict=True) if level in levels]
    return own if any(own) else [1.0] * len(levels)


def read(
    level: int, first: int, count: int, *, split: str, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Problems ``first`` to ``first + count - 1``: tokens, prompt and length as in `Batch`."""
    problems = [problem(level, first + i, split=split, seed=seed) for i in range(count)]
    tokens = np.zeros((count, WIDTHS[level]), np.int16)
    for row, found in enumerate(problems):
        tokens[row, : len(found.tokens)] = found.tokens
    prompt = np.array([found.prompt for found in problems], np.int32)
    return tokens, prompt, np.array([len(found.tokens) for found in problems], np.int32)
