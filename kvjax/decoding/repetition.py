"""Noticing that a row has fallen into a loop."""

import dataclasses

import numpy as np

LONGEST_LOOP = 64
COVERED = 512


@dataclasses.dataclass(frozen=True)
class LoopWatch:
    """For each loop length, how many of the latest tokens repeat the token that far back.

    Attributes:
        tail: the latest tokens, the last one at the end.
        runs: entry ``p - 1``: how many tokens in a row equal the one ``p`` before them.
    """

    tail: tuple[int, ...] = ()
    runs: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(LONGEST_LOOP, np.int64))

    def push(self, token: int) -> tuple["LoopWatch", bool]:
        """The watch after one more token, and whether a loop now covers ``COVERED`` tokens.

        A loop of ``p`` tokens covers its first round and all that repeats it.
        """
        past = np.full(LONGEST_LOOP, -1)
        if self.tail:
            past[: len(self.tail)] = self.tail[::-1]
        runs = np.where(past == token, self.runs + 1, 0)
        covered = (runs > 0) & (runs + np.arange(1, LONGEST_LOOP + 1) >= COVERED)
        return LoopWatch((*self.tail, token)[-LONGEST_LOOP:], runs), bool(covered.any())
