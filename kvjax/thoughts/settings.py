"""How thresholds are found in samples of sparsity: all that the paper leaves open."""

import dataclasses
import math
from typing import Any, Literal, get_args

from kvjax.errors import UsageError

Rule = Literal["scott", "silverman"]
TieBreak = Literal["depth", "first", "last"]


@dataclasses.dataclass(frozen=True)
class FitSettings:
    """Switches with their defaults; docs/thinkv.md says why they are these.

    Attributes:
        bandwidth: of the kernel density estimate: ``scott``, ``silverman``, or a factor on the
            standard deviation of the samples.
        grid: points at which the estimate is taken.
        prominence: how far a mode has to stand out of what surrounds it, relative to the highest.
        min_samples: an answer of fewer tokens takes no part.
        min_share: share of prompts on which a layer has to show three modes to be chosen. Those
            prompts give its thresholds; 1 asks for all prompts.
        tie_break: among layers of equal share: the deepest valleys first (``depth``), or by index.
        layers: how many are chosen at most, the paper's L*.

    Raises:
        UsageError: a value out of its range.
    """

    bandwidth: Rule | float = "scott"
    grid: int = 512
    prominence: float = 0.05
    min_samples: int = 64
    min_share: float = 0.5
    tie_break: TieBreak = "depth"
    layers: int = 4

    def __post_init__(self):
        if self.bandwidth not in get_args(Rule) and not _is_number(self.bandwidth, 0, math.inf):
            raise UsageError(
                f"bandwidth must be {', '.join(get_args(Rule))} or a factor above 0, "
                f"got {self.bandwidth!r}"
            )
        if self.tie_break not in get_args(TieBreak):
            allowed = ", ".join(get_args(TieBreak))
            raise UsageError(f"tie_break must be one of {allowed}, got {self.tie_break!r}")
        for name in ("prominence", "min_share"):
            if not _is_number(value := getattr(self, name), 0, 1):
                raise UsageError(f"{name} must be above 0 and at most 1, got {value!r}")
        for name, least in (("grid", 16), ("min_samples", 2), ("layers", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"{name} must be a whole number from {least}, got {value!r}")


def _is_number(value: Any, above: float, most: float) -> bool:
    return type(value) in (int, float) and above < value <= most and math.isfinite(value)
