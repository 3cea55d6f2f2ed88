"""Attention to latents as a GPU runs it; see ``test_kernels`` for how."""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels import latent_attention
from tests.kernels.latents import Case, expected, problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="no NVIDIA GPU"),
]
CASES = [
    Case(tokens=(700, 0, 513), span=1024, page=16, kv_heads=2, heads=8, dim=128, blocks=(1, 8)),
    Case(tokens=(300,), span=512, page=16, kv_heads=3, heads=9, dim=64, blocks=(8,), mean=True),
    Case(tokens=(300, 41), span=512, page=64, kv_heads=2, heads=8, dim=64, blocks=(4,), fmt="int8"),
    Case(tokens=(300, 41), span=512, page=16, kv_heads=2, heads=8, dim=64, blocks=(4,), fmt="int4"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_latent_attention(case, implementation):
    """As exact as float32, and ten times the same bits."""
    arguments, dense = problem(case)
    run = functools.partial(
        latent_attention, scale=0.05, span=case.span, implementation=implementation
    )
    run = jax.jit(run)
    first = run(**arguments)
    for mine, theirs in zip(first, expected(case, arguments, dense, scale=0.05), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    for _ in range(9):
        for again, before in zip(run(**arguments), first, strict=True):
            np.testing.assert_array_equal(again, before)
