"""The solvers against numpy's and scipy's in float64."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from kvjax.matching.bias import descend, fit_common_weight, fit_weights
from kvjax.matching.least_squares import largest_eigenvalue, least_squares
from kvjax.matching.values import fit_values

SHAPES = [(40, 13), (13, 13), (9, 30)]
LOW, HIGH = np.exp(-3), np.exp(3)


@functools.cache
def compiled(function):
    options = {"ridge", "bounds", "steps", "relative"} & set(inspect.signature(function).parameters)
    return jax.jit(
        function,
        static_argnames=sorted(options),
        compiler_options={"xla_backend_optimization_level": 0},
    )


def masses(rows: int, columns: int, others: int = 25, seed: int = 0):
    """Float32 ``exp(logit - shift)`` of kept slots, and the mass of these and others."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.standard_normal((rows, columns + others))
    e = np.exp(logits - logits.max(1, keepdims=True)).astype(np.float32)
    return e[:, :columns], e.sum(1)


def loss(a, x, b) -> float:
    return float(((a.astype(float) @ np.asarray(x, float) - b) ** 2).sum())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ridge", [0.0, 1e-2])
def test_least_squares(shape, ridge):
    rng = np.random.default_rng(1)
    a = rng.standard_normal(shape).astype(np.float32)
    if shape[0] == shape[1]:
        a += 4 * np.eye(len(a), dtype=np.float32)
    b = rng.standard_normal((shape[0], 3)).astype(np.float32)
    got = np.asarray(compiled(least_squares)(jnp.asarray(a), jnp.asarray(b), ridge=ridge))
    wide = a.astype(float)
    top = np.linalg.norm(wide, 2) ** 2
    if not ridge:
        np.testing.assert_allclose(got, np.linalg.lstsq(wide, b)[0], rtol=1e-3, atol=1e-4)
        return
    used = float(largest_eigenvalue(jnp.asarray(a)))
    assert 0.2 * top < used <= top * 1.0001
    normal = wide.T @ wide + ridge * used * np.eye(shape[1])
    np.testing.assert_allclose(got, np.linalg.solve(normal, wide.T @ b), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_least_squares_of_what_has_no_full_rank(shape):
    """Equal columns, equal rows, and nothing at all: finite, and as good as it gets."""
    a, b = masses(*shape)
    a = a.copy()
    a[:, 1] = a[:, 0]
    a[-1], b[-1] = a[0], b[0]
    got = compiled(least_squares)(jnp.asarray(a), jnp.asarray(b)[:, None], ridge=0.0)
    least = loss(a, np.linalg.lstsq(a.astype(float), b)[0], b)
    assert loss(a, got[:, 0], b) <= least + 1e-3 * (b**2).sum()
    np.testing.assert_allclose(got[0], got[1], rtol=0.05)
    for ridge in (0.0, 1e-2):
        zeros = jnp.zeros(shape, jnp.float32)
        got = compiled(least_squares)(zeros, jnp.asarray(b)[:, None], ridge=ridge)
        np.testing.assert_array_equal(got, 0)


def fit(a, b, free, **options):
    options = {"bounds": (LOW, HIGH), "ridge": 0.0, "steps": 2, "relative": False} | options
    return np.asarray(
        compiled(fit_weights)(*(jnp.asarray(x) for x in (a, b, free)), **options), float
    )


def test_released_weights_are_nearly_those_of_nnls():
    """Well posed: a loss within .1 % of exact solvers, with and without a box that binds."""
    a, b = masses(2000, 60, others=400, seed=2)
    b = b - 0.35 * a.sum(1) * 1.5  # so that some weights would be negative
    free = np.ones(60, bool)
    got = fit(a, b, free, bounds=(1e-12, 1e6), steps=20)
    _, residual = scipy.optimize.nnls(a.astype(float), b.astype(float))
    assert loss(a, got, b) <= 1.001 * residual**2
    boxed = scipy.optimize.lsq_linear(a.astype(float), b.astype(float), (1.8, 3.0))
    assert (boxed.active_mask != 0).sum() > 10
    got = fit(a, b, free, bounds=(1.8, 3.0), steps=20)
    assert got.min() >= 1.8 - 1e-6 and got.max() <= 3 + 1e-6
    assert loss(a, got, b) <= 1.001 * 2 * boxed.cost


@pytest.mark.parametrize(("shape", "relative"), [*zip(SHAPES, (False, True, True), strict=True)])
def test_released_weights_step_by_step(shape, relative):
    a, b = masses(*shape, seed=3)
    free = np.arange(shape[1]) % 4 != 1
    got = fit(a, b, free, relative=relative)
    assert (got[~free] == 1).all()
    rows = 1 / b if relative else np.ones(len(b))
    left = a[:, free].astype(float) * rows[:, None]
    right = (b - a[:, ~free].sum(1)) * rows
    w = np.clip(np.linalg.lstsq(left, right)[0], LOW, HIGH)
    start = np.ones(left.shape[1])
    for _ in range(3):
        start = left.T @ (left @ start)
        start /= np.linalg.norm(start)
    top = np.linalg.norm(left @ start) ** 2
    for _ in range(2):
        w = np.clip(w - left.T @ (left @ w - right) / top, LOW, HIGH)
    np.testing.assert_allclose(got[free], w, rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize(("shape", "relative"), [*zip(SHAPES, (False, True, True), strict=True)])
def test_robust_weights_are_drawn_towards_a_common_one(shape, relative):
    a, b = masses(*shape, seed=4)
    free = np.arange(shape[1]) % 5 != 2
    got = fit(a, b, free, ridge=1e-2, relative=relative)
    rows = 1 / b if relative else np.ones(len(b))
    left = a[:, free].astype(float) * rows[:, None]
    right = (b - a[:, ~free].sum(1)) * rows
    total = left.sum(1)
    common = total @ right / (total @ total)
    top = float(largest_eigenvalue(jnp.asarray(left, jnp.float32)))
    change = np.linalg.solve(
        left.T @ left + 1e-2 * top * np.eye(left.shape[1]), left.T @ (right - common * total)
    )
    assert (got[~free] == 1).all()
    np.testing.assert_allclose(got[free], np.clip(common + change, LOW, HIGH), rtol=1e-3)
    one = compiled(fit_common_weight)(
        *(jnp.asarray(x) for x in (a, b, free)), bounds=(LOW, HIGH), relative=relative
    )
    np.testing.assert_allclose(np.asarray(one)[free], common, rtol=1e-5)
    assert (np.asarray(one)[~free] == 1).all()
    stiff = fit(a, b, free, ridge=1e4, relative=relative)
    np.testing.assert_allclose(stiff[free], common, rtol=1e-3)


def test_descent_never_leaves_the_box_and_never_gets_worse():
    a, b = masses(60, 40, seed=5)
    w = jnp.asarray(np.random.default_rng(0).uniform(LOW, HIGH, 40), jnp.float32)
    losses = [loss(a, w, b)]
    for _ in range(12):
        w = compiled(descend)(jnp.asarray(a), jnp.asarray(b), w, bounds=(LOW, HIGH), steps=1)
        assert w.min() >= LOW - 1e-6 and w.max() <= HIGH + 1e-5
        losses.append(loss(a, w, b))
    assert all(after <= before for before, after in itertools.pairwise(losses))
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ridge", [0.0, 1e-2])
def test_values(shape, ridge):
    rng = np.random.default_rng(6)
    a, _ = masses(*shape, seed=6)
    a = a / a.sum(1, keepdims=True)
    v = rng.standard_normal((shape[1], 4)).astype(np.float32)
    target = rng.standard_normal((shape[0], 4)).astype(np.float32)
    free = np.arange(shape[1]) % 3 != 1
    arrays = [jnp.asarray(x) for x in (a, target, v, free)]
    got = np.asarray(compiled(fit_values)(*arrays, ridge=ridge))
    np.testing.assert_array_equal(got[~free], v[~free])
    left = a[:, free].astype(float)
    right = target - a[:, ~free].astype(float) @ v[~free]
    if ridge:
        top = float(largest_eigenvalue(jnp.asarray(left, jnp.float32)))
        normal = left.T @ left + ridge * top * np.eye(left.shape[1])
        wanted = v[free] + np.linalg.solve(normal, left.T @ (right - left @ v[free]))
        np.testing.assert_allclose(got[free], wanted, rtol=1e-3, atol=1e-3)
    else:
        wanted = np.linalg.lstsq(left, right)[0]
        np.testing.assert_allclose(got[free], wanted, rtol=2e-2, atol=2e-2 * abs(wanted).max())
