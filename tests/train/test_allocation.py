"""Ranks by token: the gate gives more components to the tokens that need them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from kvjax.dynakv.forward import through
from kvjax.dynakv.settings import SpectralSettings
from kvjax.dynakv.spectrum import SpectralGate, Spectrum

WIDTH, FEW = 16, 2


def test_tokens_that_need_few_components_get_few():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 128, WIDTH)).astype(np.float32)
    x[:, ::2, FEW:] *= 0.01  # every other token lies in a plane
    x = jnp.asarray(x)[:, :, None]
    one = Spectrum(jnp.eye(WIDTH), jnp.zeros(WIDTH), SpectralSettings(tilt=4.0), None)
    graph, gates, rest = nnx.split(one, SpectralGate, ...)
    adam = optax.adam(0.05)

    def loss(gates):
        own = nnx.merge(graph, gates, rest)
        rebuilt, soft, _ = through(own, own.basis(), x, "soft")
        return jnp.square(rebuilt - x).sum(-1).mean() + 2 * jnp.square(soft.mean())

    @jax.jit
    def update(gates, state):
        with jax.numpy_dtype_promotion("standard"):
            change, state = adam.update(jax.grad(loss)(gates), state)
        return optax.apply_updates(gates, change), state

    state = adam.init(gates)
    for _ in range(150):
        gates, state = update(gates, state)
    own = nnx.merge(graph, gates, rest)
    _, _, hard = through(own, own.basis(), x, "hard")
    hard = np.asarray(hard)[0] * WIDTH
    assert hard[::2].mean() + 4 < hard[1::2].mean()
