"""K-means of every implementation against a plain loop in float64, and what it refuses."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cluster_centers
from pallas_kernels.cluster_centers.triton import cluster_centers_triton, unsupported
from pallas_kernels.cluster_centers.xla import cluster_centers_xla
from tests.kernels.segments import HEADS, KINDS, ROWS, chosen, compare, keys_of, start_of
from tests.thoughts import kept

BACKENDS = {
    "triton": jax.jit(
        functools.partial(cluster_centers_triton, interpret=True), static_argnames="iterations"
    ),
    "xla": jax.jit(cluster_centers_xla, static_argnames="iterations"),
}
SHORT = 16, 8, 16
"""Tokens, clusters and channels."""
SHAPES = [SHORT, (128, 64, 128), (40, 13, 16)]
MORE = [
    (8, 4, 16),
    (128, 4, 16),
    (64, 32, 64),
    (32, 16, 128),
    (64, 4, 128),
    (128, 64, 16),
    (40, 31, 16),
]
WIDE = len(KINDS) * ROWS, HEADS
ROUNDS = 4
MARGIN = 1e-3
"""Decisions closer than this share of the distances are left to either."""


def cluster(backend: str, keys, count: int, rounds: int = ROUNDS):
    keys = jnp.asarray(keys)
    return jax.device_get(BACKENDS[backend](keys, start_of(keys.shape[2], count), rounds))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "shape", [*SHAPES, *(pytest.param(shape, marks=pytest.mark.slow) for shape in MORE)], ids=str
)
def test_clusters(shape, backend):
    """Every kind of keys, against the oracle and the distances of the reference."""
    tokens, count, dim = shape
    drawn = [keys_of(kind, *shape, seed=tokens + dim) for kind in KINDS]
    keys = np.concatenate(drawn)
    near, apart = cluster(backend, keys, count)
    clear = compare((near, apart), keys, count, ROUNDS, MARGIN)
    assert clear >= 3 * ROWS * HEADS, "too few draws with clear decisions"
    expected = cluster("xla", keys, count)
    clear = slice(ROWS * KINDS.index("random") + ROWS, None)
    np.testing.assert_array_equal(near[clear], expected[0][clear])
    np.testing.assert_allclose(apart[clear], expected[1][clear], rtol=1e-5, atol=1e-5)
    equal = near[-ROWS:]
    assert equal[..., 0].all() and not equal[..., 1:].any() and not apart[-ROWS:].any()


def test_the_public_op_takes_xlas_way_where_there_is_no_gpu():
    keys, start = jnp.asarray(keys_of("random", *SHORT, size=WIDE)), start_of(*SHORT[:2])
    found = jax.jit(cluster_centers, static_argnames="iterations")(keys, start, ROUNDS)
    for part, expected in zip(found, cluster("xla", keys, SHORT[1]), strict=True):
        np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rounds", [0, 1])
def test_rounds(rounds, backend):
    keys = keys_of("random", *SHORT, size=WIDE)
    found = cluster(backend, keys, SHORT[1], rounds)
    assert compare(found, keys, SHORT[1], rounds, MARGIN) > 4
    if rounds == 0:  # clusters are around the tokens that they start from
        start = kept.spaced(*SHORT[:2])
        assert found[0][..., start].all() and (found[1][..., start] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_two_tokens_alone_the_earlier_counts(backend):
    """They are equally far from their center, however the last bits of it are rounded."""
    _, count, dim = SHORT
    keys = keys_of("clustered", *SHORT, size=WIDE)
    keys[:, :, 1::2] = keys[:, :, ::2] + 0.3 * keys_of("random", count, count, dim, size=WIDE)
    near, _ = cluster(backend, keys, count)
    assert near[..., ::2].all() and not near[..., 1::2].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounding_is_no_distance(backend):
    """Seven and nine equal keys, whose mean is not always as many bits as they have."""
    tokens, count, dim = SHORT
    two = keys_of("random", 2, count, dim, size=WIDE)
    near, apart = cluster(backend, two[:, :, (np.arange(tokens) >= 7).astype(int)], count)
    assert not apart.any()
    assert (near == np.isin(np.arange(tokens), [0, 7])).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_all_keys_have_in_common_costs_no_digits(backend):
    count = SHORT[1]
    near = keys_of("clustered", *SHORT, size=WIDE)
    far = near + np.float32(3000)
    found = cluster(backend, far, count)
    assert compare(found, far, count, ROUNDS, MARGIN) == WIDE[0] * WIDE[1]
    x = (far - far[:, :, :1]).astype(np.float32)
    np.testing.assert_allclose(found[1], cluster(backend, x, count)[1], rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_centers_that_differ_by_little_of_their_size(backend):
    """The first token is far from all others, so that much more than differences is multiplied."""
    keys = keys_of("random", *SHORT, size=WIDE)
    keys[:, :, 1:] += 10
    found = cluster(backend, keys, SHORT[1])
    assert compare(found, keys, SHORT[1], ROUNDS, 0.01) > 8


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_and_heads_do_not_feel_each_other(backend):
    """What others hold, NaN too, leaves a head as it is."""
    keys = keys_of("random", *SHORT, size=WIDE)
    found = cluster(backend, keys, SHORT[1])
    for other in (np.nan, np.inf, 7.0):
        changed = keys.copy()
        changed[0] = changed[1, 1] = other
        for part, alone in zip(cluster(backend, changed, SHORT[1]), found, strict=True):
            np.testing.assert_array_equal(part[1, 0], alone[1, 0])


def test_keys_in_bfloat16():
    keys = jnp.asarray(keys_of("clustered", *SHORT, size=WIDE), jnp.bfloat16)
    found, wide = (cluster("triton", x, SHORT[1]) for x in (keys, keys.astype(jnp.float32)))
    for part, expected in zip(found, wide, strict=True):
        np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize(
    ("shape", "count", "reason"),
    [
        ((129, 16), 4, "1 to 128 tokens, got 129"),
        ((0, 16), 4, "1 to 128 tokens, got 0"),
        ((128, 16), 65, "1 to 64 clusters, got 65"),
        ((128, 16), 0, "1 to 64 clusters, got 0"),
        ((16, 8), 4, "at least 16, got 8"),
        ((16, 96), 4, "a power of two .* got 96"),
        ((65, 256), 4, "65 tokens of 256 channels"),
        ((64, 256), 4, None),
        ((128, 128), 64, None),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_do_is_xlas(unchecked, shape, count, reason):
    keys = jax.ShapeDtypeStruct((2, 2, *shape), jnp.float32)
    start = jax.ShapeDtypeStruct((count,), jnp.int32)
    call = functools.partial(cluster_centers, iterations=1)
    if shape[0]:
        assert ("pallas_call" in str(jax.make_jaxpr(call)(keys, start))) == (reason is None)
    if reason is None:
        assert unsupported(keys, start) is None
        return
    with pytest.raises(NotImplementedError, match=f"triton cluster_centers: .*{reason}"):
        jax.eval_shape(functools.partial(call, implementation="triton"), keys, start)


@pytest.mark.parametrize(("capability", "fits"), [("8.0", True), ("8.9", False), ("9.0", True)])
def test_gpus_with_little_shared_memory_take_xlas_way(unchecked, monkeypatch, capability, fits):
    gpu = types.SimpleNamespace(compute_capability=capability, device_kind="NVIDIA L4")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    start = jax.ShapeDtypeStruct((4,), jnp.int32)
    small, large = (jax.ShapeDtypeStruct((2, 2, n, 128), jnp.float32) for n in (64, 128))
    assert unsupported(small, start) is None
    assert (unsupported(large, start) is None) == fits
    assert fits or "than NVIDIA L4 has" in unsupported(large, start)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": jnp.zeros((2, 16, 16))}, r"keys must be floats .* got float32 \(2, 16, 16\)"),
        ({"keys": jnp.zeros((2, 2, 16, 16), jnp.int32)}, "keys must be floats .* got int32"),
        ({"start": jnp.zeros(4)}, r"start must be a list of indices, got float32 \(4,\)"),
        ({"start": jnp.zeros((2, 4), jnp.int32)}, r"start must be .* got int32 \(2, 4\)"),
        ({"iterations": -1}, "iterations must be at least 0, got -1"),
        ({"implementation": "mosaic"}, "implementation .* got 'mosaic'"),
    ],
)
def test_arguments_that_do_not_fit_together(unchecked, change, message):
    arguments = {"keys": jnp.zeros((2, 2, 16, 16)), "start": start_of(16, 4), "iterations": 1}
    with pytest.raises(ValueError, match=message):
        cluster_centers(**(arguments | change))


def test_chosen_fills_up_with_the_farthest():
    near, apart = np.array([0, 1, 0, 0], bool), np.array([2.0, 0.0, 2.0, 1.0])
    assert chosen(near, apart, 2) == [0, 1]
