"""Products beside a model, and their gradients, of any number of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.dynakv import product as module
from kvjax.dynakv.product import product


@pytest.mark.parametrize("shape", [(3, 7), (2, 64), (1, 1), (130,), (64,)])
@pytest.mark.parametrize("exact", [True, False])
def test_a_product_and_its_gradients(shape, exact):
    rng = np.random.default_rng(0)
    x, matrix = rng.standard_normal((*shape, 6)), rng.standard_normal((6, 5))
    towards = rng.standard_normal((*shape, 5))
    given = (jnp.asarray(one, jnp.float32) for one in (x, matrix))
    found, back = jax.vjp(lambda x, matrix: product(x, matrix, exact), *given)
    by_x, by_matrix = back(jnp.asarray(towards, jnp.float32))
    np.testing.assert_allclose(found, x @ matrix, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(by_x, towards @ matrix.T, rtol=1e-5, atol=1e-5)
    expected = x.reshape(-1, 6).T @ towards.reshape(-1, 5)
    np.testing.assert_allclose(by_matrix, expected, rtol=1e-5, atol=1e-5)


def test_only_exact_products_ask_for_more_than_a_gpus_default():
    x, matrix = jnp.ones((4, 6)), jnp.ones((6, 5))
    texts = [
        str(jax.make_jaxpr(lambda x, m, e=exact: product(x, m, e))(x, matrix))
        for exact in (True, False)
    ]
    assert ["HIGHEST" in text for text in texts] == [True, False]


def test_a_sum_over_tokens_is_cut_into_parts_of_single_rows():
    def parts(*shape: int) -> list[tuple[int, ...]]:
        x, y = jnp.ones((*shape, 6)), jnp.ones((*shape, 5))
        steps = jax.make_jaxpr(module._over_tokens)(x, y).eqns
        return [step.outvars[0].aval.shape for step in steps if "dot" in str(step.primitive)]

    assert parts(640) == [(64, 6, 5)]
    assert parts(96) == [(32, 6, 5)]
    assert parts(7) == [(1, 6, 5)]
    assert parts(4, 48) == [(4, 16, 6, 5)]
    assert parts(100, 48) == [(100, 1, 6, 5)]


@pytest.mark.parametrize("devices", [2, 3])
def test_devices_that_share_rows_only_add_up(devices):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.ShapeDtypeStruct((6, 32, 8), jnp.float32, sharding=rows)

    def moved(function) -> set[str]:
        text = jax.jit(function).lower(x, x).compile().as_text()
        return {kind for kind in ("all-gather", "all-reduce", "all-to-all") if kind in text}

    def across_rows(x, y):
        return module._over_tokens(x.reshape(-1, 8), y.reshape(-1, 8))

    assert moved(module._over_tokens) == {"all-reduce"}
    assert devices == 2 or "all-gather" in moved(across_rows)  # or the check would be blind
