"""Benchmarks on a shared machine: what others do meanwhile is measured, and waited out."""

import os
import time
from collections.abc import Iterable

DISTURBED = 0.1
"""Cores that others may use before a figure counts as theirs too."""
_TICKS = os.sysconf("SC_CLK_TCK")


def use_cores(count: int) -> list[int]:
    """Keep this process, and those that it starts, to the first ``count`` cores that it may use.

    XLA takes as many threads as there are; call this before JAX's first computation.
    """
    cores = sorted(os.sched_getaffinity(0))[:count]
    os.sched_setaffinity(0, cores)
    return cores


class Others:
    """Cores that processes other than ours use, on average since this was made.

    Args:
        pids: our own.
    """

    def __init__(self, pids: Iterable[int]):
        self._pids = list(pids)
        self._start, self._busy = time.monotonic(), self._others()

    def cores(self) -> float:
        return (self._others() - self._busy) / (time.monotonic() - self._start)

    def _others(self) -> float:
        """Seconds that all cores together have worked, for others than us, since the start."""
        with open("/proc/stat") as stat:
            user, nice, system, _, _, *rest = map(int, stat.readline().split()[1:9])
        ours = 0
        for pid in self._pids:
            with open(f"/proc/{pid}/stat") as stat:
                fields = stat.read().rpartition(")")[2].split()
            ours += int(fields[11]) + int(fields[12])
        return (user + nice + system + sum(rest) - ours) / _TICKS


def wait_for_quiet(pids: Iterable[int], deadline: float) -> None:
    """Wait until others have left two seconds alone, or ``time.monotonic()`` is past a deadline."""
    while True:
        others = Others(pids)
        time.sleep(2)
        if others.cores() < DISTURBED or time.monotonic() > deadline:
            return
