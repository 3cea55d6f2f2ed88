"""Gates as wide as a real model's follow their optimiser and the steering of alpha to low rates.

What they lose is made up: of each spectrum, the share of a falling sequence that is masked. The
optimiser, the mask, the hard rank and the controller are those of training.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kvjax.dynakv.mask import rank_of, soft_mask
from kvjax.dynakv.settings import SpectralSettings
from kvjax.train.dynakv import optimiser as optimisers
from kvjax.train.dynakv.alpha import AlphaControl
from kvjax.train.dynakv.settings import TrainSettings

WIDTH, SPECTRA, STEPS = 192, 60, 305


def lost() -> jax.Array:
    """What each component is worth: falling at another pace in each spectrum, and sums of 1."""
    pace = np.linspace(20, 60, SPECTRA)[:, None]
    worth = np.exp(-np.arange(WIDTH) / pace) + 0.02
    return jnp.asarray(worth / worth.sum(1, keepdims=True), jnp.float32)


def final_rate(target: float, scale: float) -> float:
    """The hard rate after as few steps as the short arms of SmolLM2's training have."""
    settings = TrainSettings(
        steps=STEPS,
        alpha=None,
        target_rate=target,
        lr_u=5e-4,
        lr_gate=3e-3,
        lr_bias=0.2,
        warmup=STEPS // 10,
    )
    gates = SpectralSettings()
    rising = gates.tilt / WIDTH * jnp.arange(WIDTH, dtype=jnp.float32)
    parameters = {"layers": {"b": jnp.tile(rising, (SPECTRA, 1))}}
    rule, control = optimisers.optimiser(settings), AlphaControl(None, target, STEPS)
    moments, state = rule.init(parameters), control.start()

    worth = lost()

    def loss(parameters, alpha):
        mask = soft_mask(parameters["layers"]["b"])
        return scale * (worth * (1 - mask) ** 2).sum(1).mean() + alpha * mask.mean() ** 2, mask

    @jax.jit
    def update(parameters, moments, alpha):
        slope, mask = jax.grad(loss, has_aux=True)(parameters, alpha)
        change, moments = rule.update(slope, moments, parameters)
        rate = rank_of(mask, gates.tau).mean(dtype=jnp.float32) / WIDTH
        return optax.apply_updates(parameters, change), moments, rate

    for step in range(STEPS):
        parameters, moments, rate = update(parameters, moments, jnp.float32(state[1]))
        state = control.update(state, step, float(rate))
    return float(rate)


@pytest.mark.parametrize("target", [0.5, 0.3, 0.2, 0.1])
@pytest.mark.parametrize("scale", [3.0, 10.0], ids=["soft", "stiff"])
def test_a_wide_gate_comes_to_its_rate(target, scale):
    assert abs(final_rate(target, scale) - target) < 0.06 * target


def test_the_usual_epsilon_would_hold_low_ranks_where_they_are(monkeypatch):
    monkeypatch.setattr(optimisers, "_EPS", 1e-8)
    assert final_rate(0.2, 3.0) > 0.3
