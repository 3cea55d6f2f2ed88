"""ThinKV's demotions as a plain state machine of one row: the oracle of ``kvjax.thoughts``.

Written from the paper (arXiv 2510.01290, section 4.3). Case 1: a transition thought demotes every
segment before it by one level. Case 2: over the budget, the oldest segment of the least important
kind is demoted by one level, again and again, until the rest fits.
"""

LEAST_IMPORTANT_FIRST = "TER"


class Machine:
    """One row.

    Attributes:
        kinds: of the segments, as far as they are known.
        levels: how often each segment was demoted.
        by_transition: demotions of case 1; ``by_budget``: of case 2.
    """

    def __init__(
        self,
        every: int,
        schedule,
        *,
        covers: str = "next",
        at: str = "start",
        repeated: bool = True,
        itself: bool = False,
    ):
        self.every, self.schedule = every, schedule
        self.covers, self.at, self.repeated, self.itself = covers, at, repeated, itself
        self.kinds: list[str] = []
        self.levels: list[int] = []
        self.by_transition = self.by_budget = 0

    def size(self, segment: int) -> int:
        level = self.levels[segment]
        return min(self.every, self.schedule[level - 1]) if level else self.every

    def border(self, number: int, kind: str, *, evicts: bool = True) -> None:
        """``number`` segments are complete, and a kind is found."""
        if self.covers == "past" and not number:
            return
        self.kinds.append(kind)
        self.levels.append(0)
        newest = len(self.kinds) - 1
        assert newest == (number if self.covers == "next" else number - 1)
        # The newest has ended already if it is told late; else it begins, and the last one ends.
        soon = self.covers == "past" or self.at == "start"
        transition = newest if soon else newest - 1
        if transition < 0 or self.kinds[transition] != "T" or not evicts:
            return
        if not self.repeated and transition and self.kinds[transition - 1] == "T":
            return
        for segment in range(transition + 1 if self.itself else transition):
            self.by_transition += self._demote(segment)

    def fit(self, closed: int, budget: int) -> None:
        """So many segments are complete and stored."""
        for kind in LEAST_IMPORTANT_FIRST:
            for segment in range(closed):
                if self.kinds[segment] != kind:
                    continue
                while sum(map(self.size, range(closed))) > budget and self._demote(segment):
                    self.by_budget += 1

    def _demote(self, segment: int) -> bool:
        able = self.levels[segment] < len(self.schedule)
        self.levels[segment] += able
        return able
