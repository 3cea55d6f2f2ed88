"""Whether cuDNN's attention is taken is decided by a trial, which XLA's stands in for here."""

import jax
import jax.numpy as jnp
import pytest

from kvjax.models import fused

SHAPE = (jnp.dtype(jnp.bfloat16), 24, 6, 8, 2)


@pytest.fixture(autouse=True)
def standard_promotion():
    """JAX's own attention mixes types."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def device(monkeypatch):
    """A GPU whose attention is XLA's times something, if it has any."""

    def has(factor: float | None):
        def attention(q, k, v, scale, window):
            if factor is None:
                raise NotImplementedError("no cuDNN")
            side = None if window is None else (window - 1, 0)
            options = {"scale": scale, "is_causal": True, "local_window_size": side}
            return factor * jax.nn.dot_product_attention(q, k, v, implementation="xla", **options)

        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(fused, "fused_attention", attention)
        fused.fused_attention_works.cache_clear()

    yield has
    fused.fused_attention_works.cache_clear()


@pytest.mark.parametrize("window", [None, 5])
def test_what_agrees_is_taken_also_while_a_program_is_traced(device, window):
    device(1.0)

    def body(x, _):
        return x * (2.0 if fused.fused_attention_works(*SHAPE, window) else 3.0), None

    found = jax.jit(lambda x: jax.lax.scan(jax.checkpoint(body), x, None, length=2)[0])(1.0)
    assert found == 4


@pytest.mark.parametrize("factor", [1.1, float("nan"), None])
def test_what_differs_or_fails_is_not(device, factor):
    device(factor)
    assert not fused.fused_attention_works(*SHAPE, None)


def test_it_is_for_bfloat16_on_gpus(device):
    assert not fused.fused_attention_works(*SHAPE, None)
    device(1.0)
    assert not fused.fused_attention_works(jnp.dtype(jnp.float32), *SHAPE[1:], None)
