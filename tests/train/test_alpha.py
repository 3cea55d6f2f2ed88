"""The steering of alpha, on a made-up gate that follows it with a lag."""

import math

import numpy as np
import pytest

from kvjax.train.dynakv.alpha import AlphaControl


def final_rate(target: float, steps: int, stiffness: float, lag: float) -> list[float]:
    """A rate that moves towards where the loss stiffness * -ln(rate) + alpha * rate**2 is least."""
    control = AlphaControl(None, target, steps)
    state, rate, seen = control.start(), 1.0, []
    for step in range(steps):
        rest = min(1.0, math.sqrt(stiffness / (2 * float(state[1]))))
        rate += (rest - rate) * min(1.0, 20 / (lag * steps))
        state = control.update(state, step, rate)
        seen.append(rate)
    return seen


@pytest.mark.parametrize("target", [0.2, 0.3, 0.6])
@pytest.mark.parametrize("steps", [100, 1000])
@pytest.mark.parametrize("stiffness", [0.05, 1.0])
@pytest.mark.parametrize("lag", [1.0, 3.0])
def test_the_rate_comes_to_its_target_and_stays(target, steps, stiffness, lag):
    seen = final_rate(target, steps, stiffness, lag)
    assert abs(np.mean(seen[-steps // 10 :]) - target) < 0.05 * target
    assert min(seen) > 0.85 * target


def test_a_given_alpha_is_left_alone():
    control = AlphaControl(2.5, None, 10)
    state = control.start()
    assert state[1] == np.float32(2.5)
    np.testing.assert_array_equal(control.update(state, 3, 0.9), state)


def test_alpha_stays_within_reason_when_the_rate_does_not_move():
    control = AlphaControl(None, 0.2, 100)
    state = control.start()
    for step in range(1000):
        state = control.update(state, step, 1.0)
    assert state[1] <= 1.001e4 and state.dtype == np.float32
    for step in range(1000, 1100):
        state = control.update(state, step, 0.05)
    assert state[1] < 1.0
