"""Attention to latents as a GPU runs it; see ``test_kernels`` for how."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from pallas_kernels import latent_attention
from pallas_kernels.latent_attention import triton
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
BFLOAT16 = [
    Case(tokens=(700, 0, 513), span=1024, page=16, kv_heads=8, heads=32, dim=128, blocks=(1, 8)),
    Case(tokens=(300, 41), span=512, page=16, kv_heads=3, heads=9, dim=64, blocks=(1, 8)),
    Case(tokens=(300, 41), span=512, page=64, kv_heads=8, heads=32, dim=128, blocks=(8,),
         fmt="int8", mean=True),
    Case(tokens=(300, 41), span=512, page=16, kv_heads=8, heads=32, dim=128, blocks=(1, 8),
         fmt="int4"),
    Case(tokens=(300,), span=512, page=16, kv_heads=2, heads=4, dim=64, blocks=(4,), fmt="int2"),
]  # fmt: skip


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


@pytest.mark.parametrize("case", BFLOAT16, ids=str)
@pytest.mark.parametrize("launch", [None, (64, 4, 2, 128), (64, 4, 3, 128)], ids=str)
def test_latent_attention_in_bfloat16(case, launch, monkeypatch):
    """Off by what rounding bases and keys takes, and ten times the same bits."""
    if launch is not None:
        monkeypatch.setitem(triton.LAUNCHES, False, triton.Launch(*launch))
    arguments, dense = problem(dataclasses.replace(case, dtype="bfloat16"))
    run = functools.partial(latent_attention, scale=0.01, span=case.span, implementation="triton")
    run = jax.jit(run)
    first = run(**arguments)
    wanted = expected(case, arguments, dense, scale=0.01)
    for mine, theirs in zip(first, wanted, strict=True):
        there = np.isfinite(theirs)
        error = np.abs(np.where(there, np.asarray(mine) - np.where(there, theirs, 0), 0))
        assert error.max() < 0.02 * np.abs(theirs[there]).max(), error.max()
    for _ in range(9):
        for again, before in zip(run(**arguments), first, strict=True):
            np.testing.assert_array_equal(again, before)
