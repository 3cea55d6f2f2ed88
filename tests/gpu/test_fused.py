"""cuDNN's attention of whole sequences."""

import jax
import jax.numpy as jnp
import pytest

from kvjax.models.fused import fused_attention_works

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("window", [None, 256])
@pytest.mark.parametrize("length", [256, 1024])
def test_it_agrees_with_ours_for_smollm2(length, window):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # it mixes them
        assert fused_attention_works(jnp.dtype(jnp.bfloat16), length, 9, 64, 3, window)
