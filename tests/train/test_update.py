"""One update: the loss is of means over everything, however the rows are spread."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.train.dynakv.alpha import AlphaControl
from kvjax.train.dynakv.loss import Trained, accumulated, cross_entropy
from kvjax.train.dynakv.optimiser import schedule
from kvjax.train.dynakv.state import Trainer
from tests.dynakv.tiny import fitted, perturbed, run, tiny, tokens
from tests.train.small import LOOSE, SETTINGS

LENGTH = SETTINGS.seq_len
MODES = ("soft", "hard")
SPREAD = {"accum": 2, "devices": 2, "remat": True}


def spectra():
    return perturbed(fitted(tiny(), tilt=LOOSE.tilt), 0.02)


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of different lengths."""
    lengths = 3 + 3 * np.arange(count)
    return tokens(tiny(), (count, LENGTH)), np.arange(LENGTH)[None] < lengths[:, None]


def updated(ids, valid, accum: int, devices: int, sharp: bool = False, **changes):
    """The loss, the gradient's norm and the parameters after one update."""
    settings = dataclasses.replace(SETTINGS, **changes)
    control = AlphaControl(3.0, None, 1).start()
    parts = (tiny().model, spectra(), settings, control, jax.devices()[:devices])
    trainer, state = Trainer.start(*parts)
    shape = (accum, -1, LENGTH)
    state, found = trainer.update(state, ids.reshape(shape), valid.reshape(shape), sharp)
    return found, jax.tree.leaves(jax.device_get(state.parameters))


def test_it_makes_no_difference_how_rows_are_spread():
    ids, valid = rows(4)
    expected, parameters = updated(ids, valid, 1, 1)
    found, others = updated(ids, valid, **SPREAD)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-6)
    np.testing.assert_allclose(found["gradient_norm"], expected["gradient_norm"], rtol=1e-4)
    rates = (one["sums"].soft_rate() for one in (found, expected))
    np.testing.assert_allclose(*rates, rtol=1e-6)
    # Adam's first step is the sign of the gradient, or almost: few signs may differ.
    for one, other in zip(parameters, others, strict=True):
        assert (np.abs(one - other) > 1e-5).mean() < 0.01


def test_padding_takes_no_part():
    ids, valid = rows(4)
    expected, _ = updated(ids, valid, **SPREAD)
    other = np.where(valid, ids, 63 - ids)
    found, _ = updated(other.astype(np.int32), valid, **SPREAD)
    for name in ("loss", "gradient_norm"):
        np.testing.assert_array_equal(found[name], expected[name])
    assert int(found["sums"].tokens) == valid.sum()
    assert int(found["sums"].predicted) == valid[:, 1:].sum()


def test_the_rate_is_averaged_before_it_is_squared():
    ids, valid = rows(4)
    _, (soft, _) = run(tiny().model, spectra(), jnp.asarray(ids), mode="soft")
    of_rows = np.asarray(soft).mean((0, 1))
    rate = of_rows[valid].mean()
    found, _ = updated(ids, valid, **SPREAD)
    expected = found["sums"].cross_entropy() + 3.0 * rate**2
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-6)
    each = [of_rows[i : i + 2][valid[i : i + 2]].mean() ** 2 for i in range(0, 4, 2)]
    assert abs(np.mean(each) - rate**2) > 1e-5  # what squaring every batch would add


def test_cross_entropy_is_that_of_the_logits():
    lm = tiny()
    ids, valid = rows(3)
    hidden = np.random.default_rng(0).standard_normal((3, LENGTH, 32)).astype(np.float32)
    logits = np.asarray(lm.model.logits(jnp.asarray(hidden)), np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    own = np.take_along_axis(logs[:, :-1], ids[:, 1:, None], -1)[..., 0]
    nats, count = cross_entropy(lm.model, jnp.asarray(hidden), jnp.asarray(ids), jnp.asarray(valid))
    np.testing.assert_allclose(nats, -own[valid[:, 1:]].sum(), rtol=1e-5)
    assert int(count) == valid[:, 1:].sum()


@pytest.mark.parametrize("length", [300, pytest.param(2, marks=pytest.mark.slow)])
def test_cross_entropy_of_rows_that_are_no_whole_number_of_chunks(length):
    lm = tiny()
    ids = jnp.asarray(tokens(lm, (2, length)))
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((2, length, 32)), jnp.float32)
    nats, count = cross_entropy(lm.model, hidden, ids, jnp.ones(ids.shape, bool))
    logs = jax.nn.log_softmax(lm.model.logits(hidden[:, :-1]))
    expected = -jnp.take_along_axis(logs, ids[:, 1:, None], -1).sum()
    np.testing.assert_allclose(nats, expected, rtol=1e-5)
    assert count == 2 * (length - 1)


@pytest.mark.parametrize(("dtype", "off"), [("float32", 1e-5), ("bfloat16", 0.01)])
def test_slopes_of_the_cross_entropy(dtype, off):
    """Made by hand beside it, against those that JAX finds of logits in float32."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((2, 300, 32)), dtype)
    head = jnp.asarray(rng.standard_normal((64, 32)), dtype)
    ids = jnp.asarray(rng.integers(64, size=(2, 300)), jnp.int32)
    counts = jnp.asarray(rng.random((2, 300)) > 0.3)

    def found(hidden, head):
        model = nnx.merge(*nnx.split(tiny().model))
        model.lm_head = nnx.Param(head)
        return 3.0 * cross_entropy(model, hidden, ids, counts)[0]

    def expected(hidden, head):
        logs = jax.nn.log_softmax(hidden[:, :-1] @ head.T)
        own = jnp.take_along_axis(logs, ids[:, 1:, None], -1)[..., 0]
        return -3.0 * jnp.where(counts[:, 1:], own, 0.0).sum()

    got = jax.value_and_grad(found, (0, 1))(hidden, head)
    want = jax.value_and_grad(expected, (0, 1))(*(x.astype(jnp.float32) for x in (hidden, head)))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(a.astype(jnp.float32) - b) < off * np.linalg.norm(b)
    assert not np.asarray(got[1][0])[:, :-1][~np.asarray(counts[:, 1:])].any()
    assert got[1][0].dtype == got[1][1].dtype == dtype


@pytest.mark.parametrize(
    ("changes", "moving"),
    [
        ({"trains": "gate"}, {"w", "b"}),
        ({"trains": "spectral"}, {"u", "w", "b"}),
        ({"trains": "all"}, {"u", "w", "b", "model"}),
    ],
)
def test_what_is_trained(changes, moving):
    lm, settings = tiny(), dataclasses.replace(SETTINGS, **changes)
    control = AlphaControl(1.0, None, 1).start()
    beside = fitted(lm, centre="mean")  # which never moves
    trainer, state = Trainer.start(lm.model, beside, settings, control, jax.devices()[:1])
    names = {
        "model" if path[0] == "model" else path[-1]
        for path, _ in nnx.to_flat_state(state.parameters)
    }
    assert names == moving
    assert trainer.trained(state).model.config == lm.config


def test_the_compressed_loss_is_the_models_own_where_nothing_is_lost():
    lm = tiny()
    ids = tokens(lm, (2, LENGTH))
    whole = fitted(lm, gate="fixed", key_rank=16, value_rank=16)
    valid = jnp.ones((1, *ids.shape), bool)
    compiled = jax.jit(accumulated, static_argnames="remat")
    sums = compiled(Trained(lm.model, whole), jnp.asarray(ids[None]), valid, remat=False)
    logs = jax.nn.log_softmax(kvjax.forward(lm, ids)[:, :-1])
    expected = -jnp.take_along_axis(logs, ids[:, 1:, None], -1).mean()
    np.testing.assert_allclose(sums.cross_entropy(), expected, rtol=1e-5)
    assert sums.soft_rate() == sums.hard_rate() == 1


def test_every_group_has_its_learning_rate():
    ids, valid = rows(4)
    control = AlphaControl(3.0, None, 1).start()
    parts = (tiny().model, spectra(), SETTINGS, control, jax.devices()[:1])
    trainer, state = Trainer.start(*parts)
    before = jax.device_get(nnx.to_flat_state(state.parameters))
    state, _ = trainer.update(state, ids[None], valid[None])
    rates = {"u": SETTINGS.lr_u, "w": SETTINGS.lr_gate, "b": SETTINGS.lr_bias}
    for (path, old), (_, new) in zip(before, nnx.to_flat_state(state.parameters), strict=True):
        moved = np.abs(np.asarray(new[...]) - old[...]).max()
        # The first of Adam's steps is one learning rate, which is half way up by then.
        np.testing.assert_allclose(moved, rates[path[-1]] / 2, rtol=1e-2)


def test_learning_rates_rise_and_fall_to_zero():
    settings = dataclasses.replace(SETTINGS, steps=10, warmup=4)
    rates = [float(schedule(1.0, settings)(step)) for step in range(11)]
    assert rates[0] > 0 and max(rates) == rates[4] == 1.0 and rates[10] == 0
    assert rates[:5] == sorted(rates[:5]) and rates[4:] == sorted(rates[4:], reverse=True)
    assert float(schedule(1.0, dataclasses.replace(settings, warmup=0))(0)) == 1.0
    assert float(schedule(1.0, dataclasses.replace(settings, steps=2))(0)) > 0


def test_a_hard_update_reads_what_a_cache_would_store():
    ids, valid = rows(4)
    control = AlphaControl(3.0, None, 1).start()
    parts = (tiny().model, spectra(), SETTINGS, control, jax.devices()[:1])
    found = {}
    for sharp in (False, True):
        trainer, state = Trainer.start(*parts)
        modes = {mode: trainer.sums(state, ids, valid, mode).cross_entropy() for mode in MODES}
        _, update = trainer.update(state, ids[None], valid[None], sharp)
        found[sharp] = float(update["sums"].cross_entropy())
    assert abs(modes["soft"] - modes["hard"]) > 1e-4
    np.testing.assert_allclose(found[False], modes["soft"], rtol=1e-5)
    np.testing.assert_allclose(found[True], modes["hard"], rtol=1e-5)
    spread, _ = updated(ids, valid, **SPREAD, sharp=True)
    np.testing.assert_allclose(spread["sums"].cross_entropy(), modes["hard"], rtol=1e-5)
