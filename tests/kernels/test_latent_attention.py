"""Attention to latents: every implementation against NumPy, whatever free slots hold."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import SCRATCH_PAGE, latent_attention
from pallas_kernels.latent_attention import triton, xla
from pallas_kernels.latent_attention.layout import blocks_of
from pallas_kernels.latent_attention.reference import latent_attention_reference
from pallas_kernels.latent_attention.triton import latent_attention_triton
from tests.kernels.latents import Case, expected, problem

SCALE = 0.3
STATIC = ("scale", "span", "window")
IMPLEMENTATIONS = {
    "reference": jax.jit(latent_attention_reference, static_argnames=STATIC),
    "xla": jax.jit(
        functools.partial(latent_attention, implementation="xla"), static_argnames=STATIC
    ),
    "triton": jax.jit(
        functools.partial(latent_attention_triton, interpret=True), static_argnames=STATIC
    ),
}
CASES = {
    "plain": Case(),
    "one pool, means": Case(blocks=(4,), mean=True, seed=1),
    "three heads of an odd width": Case(
        tokens=(50, 1), kv_heads=3, heads=9, dim=26, blocks=(1, 6), page=4, seed=2
    ),
    "int8": Case(blocks=(4,), fmt="int8", seed=3),
    "int4, many blocks": Case(blocks=(8,), fmt="int4", page=16, seed=4),
    "a device's own heads": Case(
        tokens=(19, 6), kv_heads=1, heads=2, blocks=(1, 3), mean=True, devices=3, seed=5
    ),
}
QUICK = {
    ("triton", "three heads of an odd width"),
    ("triton", "int4, many blocks"),
    ("reference", "plain"),
}
every = pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=() if quick else pytest.mark.slow, id=f"{name}-{case}")
        for name in IMPLEMENTATIONS
        for case in CASES
        for quick in [name == "xla" or (name, case) in QUICK]
    ],
)
implementations = pytest.mark.parametrize("run", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


def close(found, wanted) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-5)


@every
def test_it_is_attention_to_what_is_rebuilt(name, case):
    case = CASES[case]
    arguments, dense = problem(case)
    found = IMPLEMENTATIONS[name](**arguments, scale=SCALE, span=case.span)
    close(found, expected(case, arguments, dense, scale=SCALE))


BFLOAT16 = [
    Case(tokens=(150, 0, 300), span=512, page=16, dim=32, blocks=(1, 4), dtype="bfloat16", seed=5),
    Case(tokens=(150,), span=256, blocks=(4,), dim=32, fmt="int8", mean=True, dtype="bfloat16"),
    Case(tokens=(40, 9), blocks=(4,), fmt="int4", page=4, dtype="bfloat16", seed=6),
]


@pytest.mark.parametrize(
    "case",
    [BFLOAT16[0], *(pytest.param(case, marks=pytest.mark.slow) for case in BFLOAT16[1:])],
    ids=["plain", "int8 and means", "int4"],
)
def test_a_model_in_bfloat16_is_multiplied_so(case):
    """Off by what rounding bases and keys takes, and by nothing else."""
    arguments, dense = problem(case)
    # These are rounded already; what is left is the turned keys' rounding, 2^-9 of each channel.
    bases = {
        name: dataclasses.replace(
            arguments[name], back=arguments[name].back.astype(jnp.bfloat16).astype(jnp.float32)
        )
        for name in ("keys", "values")
    }
    arguments |= bases
    wanted, sums = expected(case, arguments, dense, scale=0.05)
    back = arguments["keys"].back.astype(jnp.bfloat16)
    arguments["keys"] = dataclasses.replace(arguments["keys"], back=back)
    out, lse = IMPLEMENTATIONS["triton"](**arguments, scale=0.05, span=case.span)
    there = np.asarray(case.tokens) > 0
    np.testing.assert_allclose(lse[there], sums[there], rtol=0, atol=2e-3)
    assert not np.any(out[~there])
    np.testing.assert_allclose(out, wanted, rtol=0, atol=4e-3)


def test_sums_of_values_in_bfloat16_lose_nothing():
    """A weight is two bfloat16 numbers, and a component is one: as exact as 16 bits."""
    arguments, (_, live) = problem(Case(tokens=(40, 9), blocks=(1, 4), page=4, dtype="bfloat16"))
    weights = np.random.default_rng(7).uniform(size=(2, 2, 2, 64))
    weights *= np.stack(live)[:, None, None]
    given = jnp.asarray(weights, jnp.float32), arguments["pools"], arguments["tables"], 32
    for share in (triton.SHARE, 16):  # of 40 tokens
        found = triton.latent_sums(*given, share=share, interpret=True)
        np.testing.assert_allclose(found, xla.latent_sums(*given), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("page", "share"), [(64, 16), (16, 32), (1, 64)])
def test_shares_of_values_may_be_smaller_than_pages(page, share):
    """And tables may have pages that are none between others."""
    case = Case(tokens=(50, 0, 3), blocks=(1, 4), page=page, seed=8)
    arguments, (_, live) = problem(case)
    tables = [
        jnp.stack([jnp.full_like(table, SCRATCH_PAGE), table], -1).reshape(*table.shape[:2], -1)
        for table in arguments["tables"]
    ]
    weights = np.random.default_rng(7).uniform(size=(3, 2, 2, 64))
    weights = jnp.asarray(weights * np.stack(live)[:, None, None], jnp.float32)
    found = triton.latent_sums(
        weights, arguments["pools"], tuple(tables), 32, share=share, interpret=True
    )
    wanted = xla.latent_sums(weights, arguments["pools"], arguments["tables"], 32)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


@implementations
def test_windows_and_sinks(run):
    case = CASES["plain"]
    arguments, dense = problem(case)
    options = {
        "window": 21,
        "q_pos": jnp.asarray([60, 3, 40], jnp.int32),
        "sinks": jnp.asarray([0.5, -2, 1, 0], jnp.float32),
    }
    found = run(**arguments, scale=SCALE, span=case.span, **options)
    close(found, expected(case, arguments, dense, scale=SCALE, **options))


@implementations
def test_a_row_without_tokens_is_zero(run):
    case = CASES["plain"]
    arguments, _ = problem(case)
    out, lse = run(**arguments, scale=SCALE, span=case.span)
    assert case.tokens[1] == 0
    assert not np.any(out[1]) and np.all(lse[1] == -np.inf)
    assert np.all(np.isfinite(np.stack([out[0], out[2]])))


def test_pages_are_read_some_at_a_time(monkeypatch):
    """As many as fit, or one, or more than there are: the same sums."""
    case = CASES["plain"]
    arguments, dense = problem(case)
    wanted = expected(case, arguments, dense, scale=SCALE)
    for slots in (1, 24):
        monkeypatch.setattr(xla, "SLOTS", slots)
        close(latent_attention(**arguments, scale=SCALE, span=case.span), wanted)


def test_nothing_as_large_as_all_keys_is_rebuilt():
    """No temporary of the program holds a key of every slot."""
    case = Case(tokens=(1500,), span=2048, blocks=(2,), page=64, kv_heads=4, heads=4)
    arguments, _ = problem(case, poison=0.0)
    run = functools.partial(latent_attention, scale=SCALE, span=case.span)
    text = str(jax.make_jaxpr(run)(**arguments))
    assert f"f32[1,{xla.SLOTS},{case.width}]" in text
    assert not any(f"f32[1,{n},{case.width}]" in text for n in (case.span, 2 * case.span))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tables": ()}, "one table a pool"),
        ({"span": 0}, "span must be at least 1"),
        ({"window": 4}, "needs `q_pos`"),
        ({"sinks": jnp.zeros(3)}, "sinks must have shape"),
        ({"implementation": "mosaic"}, "implementation must be"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit_is_refused(change, message):
    arguments, _ = problem(Case(tokens=(3,)))
    with pytest.raises(ValueError, match=message):
        latent_attention(**arguments | {"scale": SCALE, "span": 64} | change)


def test_codes_that_the_kernels_do_not_know_are_refused():
    arguments, _ = problem(Case(tokens=(3,), blocks=(2,)))
    (pool,) = arguments["pools"]
    scale = jnp.zeros((*pool.pos.shape, 1), jnp.float16)
    coded = dataclasses.replace(pool, k=pool.k.astype(jnp.uint8), k_scale=scale, k_format="fp8")
    arguments["pools"] = (coded,)
    with pytest.raises(NotImplementedError, match="no latents in codes of fp8"):
        latent_attention(**arguments, scale=SCALE, span=64, implementation="triton")


@pytest.mark.parametrize("fmt", ["float", "int4"])
def test_slots_of_another_width_are_refused(fmt):
    arguments, _ = problem(Case(tokens=(3,), blocks=(2,), fmt=fmt))
    [pool], [table] = arguments["pools"], arguments["tables"]
    assert blocks_of(pool, table, 32) == 2
    arguments["tables"] = (table[:, :2],)
    for refused in (
        lambda: blocks_of(pool, table[:, :2], 32),
        lambda: latent_attention(**arguments, scale=SCALE, span=64),
    ):
        with pytest.raises(ValueError, match="slots must hold 32 components, got 16"):
            refused()
