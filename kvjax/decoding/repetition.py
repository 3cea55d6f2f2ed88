"""Noticing that a row has fallen into a loop."""

import dataclasses
from collections.abc import Sequence

import numpy as np

LONGEST_LOOP = 64
COVERED = 512


@dataclasses.dataclass(frozen=True)
class LoopWatch:
    """For each loop length, how many of the latest tokens repeat the token that far back.

    Attributes:
        tail: the latest tokens, the last one at the end, behind -1 where there are fewer.
        runs: entry ``p - 1``: how many tokens in a row equal the one ``p`` before them.
    """

    tail: np.ndarray = dataclasses.field(default_factory=lambda: np.full(LONGEST_LOOP, -1))
    runs: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(LONGEST_LOOP, np.int64))

    def push(self, tokens: Sequence[int]) -> tuple["LoopWatch", int | None]:
        """The watch after more tokens, and with which of them a loop first covers ``COVERED``.

        A loop of ``p`` tokens covers its first round and all that repeats it.
        """
        if not tokens:
            return self, None
        line = np.concatenate([self.tail, tokens])
        past = np.lib.stride_tricks.sliding_window_view(line[:-1], LONGEST_LOOP)[:, ::-1]
        same = past == line[LONGEST_LOOP:, None]
        count = np.arange(1, len(tokens) + 1)[:, None]
        broken = np.maximum.accumulate(np.where(same, 0, count), axis=0)
        runs = count - broken + np.where(broken, 0, self.runs)
        lengths = np.arange(1, LONGEST_LOOP + 1)
        covered = ((runs > 0) & (runs + lengths >= COVERED)).any(1)
        first = int(covered.argmax()) if covered.any() else None
        return LoopWatch(line[-LONGEST_LOOP:], runs[-1]), first
