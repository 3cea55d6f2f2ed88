"""JAX's own attention and Optax mix types, so that strict promotion is not for training."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def standard_promotion():
    before = jax.config.jax_numpy_dtype_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", before)
