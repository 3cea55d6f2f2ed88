"""The weight of the rate in the loss: as given, or steered to a target rate.

The steering is ours: the paper trains one model for each weight and reports the rate that comes of
it.
"""

import dataclasses
import math

import numpy as np

_GAIN = 8.0
"""How much ln(alpha) changes for an error of 1 in the logarithm of the rate."""
_INTEGRAL = 0.05
"""Share of the run after which a lasting error has moved ln(alpha) once more by its gain."""
_APPROACH = 0.6
"""Share of the run over which the wanted rate goes from 1 to the target."""
_LIMIT = math.log(1e4)


@dataclasses.dataclass(frozen=True)
class AlphaControl:
    """A proportional-integral controller of ln(alpha).

    The wanted rate falls in a straight line and is then held, so that the gate is never driven
    faster than the bases can follow.

    Attributes:
        alpha: the constant weight, or None.
        target_rate: the hard rate to reach, or None.
        steps: of the run.
    """

    alpha: float | None
    target_rate: float | None
    steps: int

    def start(self) -> np.ndarray:
        """Float32 [2]: the sum of errors as a change of ln(alpha), and alpha itself."""
        alpha = 1.0 if self.alpha is None else self.alpha
        return np.asarray([0.0, alpha], np.float32)

    def wanted(self, step: int) -> float:
        """The hard rate that ought to be there after ``step`` updates."""
        share = min(1.0, step / max(1.0, _APPROACH * self.steps))
        return 1.0 + share * (self.target_rate - 1.0)

    def update(self, state: np.ndarray, step: int, hard_rate: float) -> np.ndarray:
        """The state after update ``step`` has found ``hard_rate``."""
        if self.target_rate is None:
            return state
        error = math.log(hard_rate / self.wanted(step))
        integral = float(state[0]) + _GAIN * error / max(1.0, _INTEGRAL * self.steps)
        integral = min(max(integral, -_LIMIT), _LIMIT)  # it must find back from a long error
        log_alpha = min(max(integral + _GAIN * error, -_LIMIT), _LIMIT)
        return np.asarray([integral, math.exp(log_alpha)], np.float32)
