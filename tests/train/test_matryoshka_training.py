"""MatryoshkaKV trained on a tiny model: its loss, its search, its files, and going on."""

import dataclasses
import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import kvjax
from kvjax.dynakv.forward import plain_states
from kvjax.errors import NumericalError, UsageError
from kvjax.report.progress import ProgressLine
from kvjax.sharding import device_mesh
from kvjax.sharding.mesh import DATA
from kvjax.train.dynakv.metrics import METRICS, read
from kvjax.train.dynakv.settings import TrainSettings
from kvjax.train.matryoshka import search
from kvjax.train.matryoshka.files import RECORD, TENSORS, load_matryoshka
from kvjax.train.matryoshka.loop import PATH, train
from kvjax.train.matryoshka.projections import LEVELS, Projections
from kvjax.train.matryoshka.settings import MatryoshkaSettings
from kvjax.train.matryoshka.update import begin, compared, projected, update
from tests.dynakv.tiny import tiny, tokens
from tests.train.matryoshka_cases import drawn, logits, shape_of
from tests.train.small import SETTINGS as SMALL
from tests.train.small import rows

SETTINGS = MatryoshkaSettings(
    target_rates=(0.5, 0.8),
    training=dataclasses.replace(SMALL, steps=6, lr_u=0.05, grad_accum=2, batch_size=2),
    drops=3,
)
SHAPE = (1, 2, 2)
QUIET = ProgressLine(sys.stderr, enabled=False)


def model():
    return tiny("llama")


def run(folder, **options):
    devices = options.pop("devices", jax.devices()[:1])
    settings = options.pop("settings", SETTINGS)
    return train(model(), rows(), settings, folder, QUIET, devices=devices, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run from end to end, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return run(folder), folder


def nats_of(wanted, found, ids):
    """KL and cross-entropy of each row's tokens but the first, in float64."""
    wanted, found = (np.asarray(x, np.float64)[:, :-1] for x in (wanted, found))
    log = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (wanted, found)]
    kl = (np.exp(log[0]) * (log[0] - log[1])).sum(-1)
    return kl, -np.take_along_axis(log[1], ids[:, 1:, None], -1)[..., 0]


def test_divergence_is_from_the_model_as_it_is_and_padding_takes_no_part():
    lm = model()
    ids = tokens(lm, (2, 12))
    valid = np.arange(12)[None] < np.array([[12], [7]])
    rng = np.random.default_rng(0)
    hidden, teacher = (
        jnp.asarray(rng.standard_normal((2, 12, lm.config.hidden_size)), jnp.float32)
        for _ in range(2)
    )
    sums = jax.jit(compared)(lm.model, hidden, teacher, ids, valid)
    kl, ce = nats_of(lm.model.logits(teacher), lm.model.logits(hidden), ids)
    counts = valid[:, 1:]
    np.testing.assert_allclose(sums.nats, [kl[counts].sum(), ce[counts].sum()], rtol=1e-4)
    assert sums.predicted == counts.sum()
    same = jax.jit(compared)(lm.model, teacher, teacher, ids, valid)
    assert same.nats[0] == 0


def test_an_update_averages_over_all_tokens_and_keeps_bases_orthogonal():
    """Against the loss on logits, at the ranks that each batch drew."""
    lm, training = model(), SETTINGS.training
    start, _ = drawn(lm)
    ids = tokens(lm, (2, 2, 12))
    valid = np.arange(12)[None, None] < np.array([[[12], [9]], [[4], [6]]])
    key = jax.random.fold_in(jax.random.key(training.seed), 7)
    ranks = jax.random.randint(key, (2, *SHAPE), 1, LEVELS + 1)
    assert (ranks.min(), ranks.max()) == (1, 8)  # of heads of 8 components
    wanted = [jax.nn.softmax(kvjax.forward(lm, one)[:, :-1]) for one in ids]

    @jax.jit
    def loss(parameters, ranks, ids, wanted, counts):
        found = logits(lm.model, projected(start, parameters), ranks, ids)[:, :-1]
        ce = optax.softmax_cross_entropy_with_integer_labels(found, ids[:, 1:])
        kl = optax.kl_divergence(jax.nn.log_softmax(found), wanted)
        return jnp.where(counts, 0.25 * kl + 0.75 * ce, 0).sum() / valid[:, :, 1:].sum()

    def whole(parameters, ranks):
        parts = zip(ranks, ids, wanted, valid[:, :, 1:], strict=True)
        return sum(float(loss(parameters, *part)) for part in parts)

    mesh = device_mesh(dp=1, devices=jax.devices()[:1])
    place = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec(None, DATA))
    decoder, first, state = jax.device_put((lm.model, start, begin(start, training)), place)
    put = jax.device_put((ids, valid), rows)  # as a run has them, whose program this is
    value = whole(state.parameters, ranks)
    state, found = update(decoder, first, state, np.int32(7), *put, settings=SETTINGS)
    np.testing.assert_allclose(found["loss"], value, rtol=1e-5)
    half = jnp.full((2, *SHAPE), 4)
    before = whole(state.parameters, half)
    for step in range(5):
        state, _ = update(decoder, first, state, np.int32(step), *put, settings=SETTINGS)
    assert whole(state.parameters, half) < before - 0.05
    u = np.asarray(projected(start, state.parameters).u, np.float64)
    assert np.abs(u - start.u).max() > 0.1
    assert np.abs(u.mT @ u - np.eye(u.shape[-1])).max() < 1e-5
    assert np.abs(state.parameters.mean - start.mean).max() > 0.05


def test_one_drop_is_the_one_that_costs_least():
    lm = tiny("llama", 2)
    projections, _ = drawn(lm)
    ids = tokens(lm, (2, 2, 12))
    valid = np.ones(ids.shape, bool)
    plain = np.stack([kvjax.forward(lm, one) for one in ids])
    states = jnp.stack([jax.jit(plain_states)(lm.model, one) for one in ids])
    cost = search.costs_of(lm.model, projections, states, jnp.asarray(ids), jnp.asarray(valid))
    levels = np.array([8, 3, 1, 5, 8, 2, 7, 8])
    costs = cost(levels)
    wanted = []
    for candidate in range(8):
        ranks = levels - (np.arange(8) == candidate)
        if levels[candidate] == 1:
            wanted.append(np.inf)
            continue
        kept = ranks.reshape(2, 2, 2).astype(np.int32)
        found = np.stack([logits(lm.model, projections, kept, one) for one in ids])
        pairs = zip(plain, found, ids, strict=True)
        wanted.append(np.mean([nats_of(*pair)[0].mean() for pair in pairs]))
    allowed = levels > 1
    np.testing.assert_allclose(costs[allowed], np.array(wanted)[allowed], rtol=1e-3)
    path = [c for c, level in enumerate(levels) for _ in range(LEVELS - level)]
    *_, last = search.sweeps(cost, 8, path, len(path) + 1, 1)
    assert last[:-1] == path and last[-1] == np.argmin(wanted)


@pytest.mark.parametrize("drops", [1, 3, 100])
def test_sweeps_end_at_the_rate_and_no_level_below_the_lowest(drops):
    asked = []

    def cost(levels):
        asked.append(levels)
        return np.array([1.0, 2.0, 0.5, 9.0]) / levels  # the lowest level of a candidate costs most

    paths = list(search.sweeps(cost, 4, [], search.drops_to(1 / LEVELS, 4), drops))
    assert all(path == paths[-1][: len(path)] for path in paths)
    assert np.array_equal(search.levels_after(paths[-1], 4), [1, 1, 1, 1])
    assert paths[0] == [2, 0, 1, 3][:drops] and len(paths[-1]) == 4 * (LEVELS - 1)
    assert min(map(min, asked)) >= 1
    for rate in (0.3, 0.5, 0.8, 1.0):
        mean = search.levels_after(paths[-1][: search.drops_to(rate, 4)], 4).mean() / LEVELS
        assert rate - 1 / (4 * LEVELS) < mean <= rate + 1e-9


def test_a_divergence_that_is_no_number_is_refused():
    with pytest.raises(NumericalError, match="divergence"):
        list(search.sweeps(lambda levels: np.array([1.0, np.nan]), 2, [], 1, 1))


def test_a_run_leaves_ranks_for_each_rate(whole):
    found, folder = whole
    lines = read(folder / METRICS)
    evals = [line for line in lines if line["kind"] == "eval"]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in evals] == [3, 6] and len(steps) == 6
    assert evals[-1]["rate"] == 0.5 and evals[-1]["kl"] != evals[0]["kl"]
    for point, rate in zip(found.points, SETTINGS.target_rates, strict=True):
        assert point.ranks.shape == SHAPE and len(np.unique(point.ranks)) > 1
        mean = point.ranks.mean() / 8
        assert rate - 1 / 32 < mean <= rate and point.measured["rate"] == pytest.approx(mean)
    assert found.points[0].measured["kl"] > found.points[1].measured["kl"] > 0
    assert len(json.loads((folder / PATH).read_bytes())) == 18  # sweeps are whole
    again = load_matryoshka(folder, model())
    for one, other in zip(again.projections, found.projections, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.array_equal(again.points[1].ranks, found.points[1].ranks)


def test_an_interrupted_run_goes_on_to_the_same_bytes(whole, tmp_path):
    asked = []

    def stop_later(count):
        asked.clear()
        return lambda: asked.append(0) or len(asked) > count

    assert run(tmp_path, should_stop=stop_later(4)) is None  # before the fifth step
    with pytest.raises(UsageError, match="holds a run already"):
        run(tmp_path)
    assert run(tmp_path, resume=True, should_stop=stop_later(3)) is None  # in the search
    assert 0 < len(json.loads((tmp_path / PATH).read_bytes())) < 16
    assert run(tmp_path, resume=True) is not None
    for name in (TENSORS, RECORD, PATH):
        assert (tmp_path / name).read_bytes() == (whole[1] / name).read_bytes()


def test_other_rates_need_no_training(whole, tmp_path):
    shutil.copytree(whole[1], tmp_path / "again")
    less = dataclasses.replace(SETTINGS, target_rates=(0.4,))
    found = run(tmp_path / "again", settings=less, resume=True)
    shorter = json.loads((whole[1] / PATH).read_bytes())
    assert json.loads((tmp_path / "again" / PATH).read_bytes())[: len(shorter)] == shorter
    assert 0.4 - 1 / 32 < found.points[0].measured["rate"] <= 0.4
    for one, other in zip(found.projections, whole[0].projections, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_it_makes_no_difference_over_how_many_devices(whole, tmp_path):
    found = run(tmp_path, devices=jax.devices()[:2])
    first, other = (read(folder / METRICS)[0] for folder in (tmp_path, whole[1]))
    for name in ("loss", "gradient_norm"):
        assert first[name] == pytest.approx(other[name], rel=1e-4)
    assert found.points[0].measured["ce"] == pytest.approx(whole[0].points[0].measured["ce"], 0.1)


def test_files_that_cannot_be_used_are_refused(whole, tmp_path):
    lm, folder = model(), whole[1]
    for name in (TENSORS, RECORD):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    other = dataclasses.replace(lm, fingerprint="another")
    with pytest.raises(UsageError, match="not for this model"):
        load_matryoshka(tmp_path, other)
    record = json.loads((tmp_path / RECORD).read_bytes())
    record["points"][0]["ranks"][0][0][0] = 9
    (tmp_path / RECORD).write_text(json.dumps(record))
    with pytest.raises(UsageError, match="ranks must be from 1 to 8"):
        load_matryoshka(tmp_path, lm)
    (tmp_path / TENSORS).write_bytes(b"cut")
    with pytest.raises(UsageError, match="damaged"):
        load_matryoshka(tmp_path, lm)
    (tmp_path / RECORD).write_text("{}")
    with pytest.raises(UsageError, match="cannot use"):
        load_matryoshka(tmp_path, lm)


def test_uniform_ranks_are_the_nearest():
    assert search.uniform(0.37, 64, SHAPE).tolist() == np.full(SHAPE, 24).tolist()
    assert search.uniform(0.125, 2, SHAPE).max() == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_rates": (0.5, 0.1)}, "target_rate must be from 1/8"),
        ({"target_rates": ()}, "target_rate must be given"),
        ({"kl_weight": 0.0, "ce_weight": 0.0}, "must not both be 0"),
        ({"kl_weight": float("nan")}, "kl_weight must be"),
        ({"drops": 0}, "drops must be at least 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(SETTINGS, **changes)


def test_the_scripts_settings_are_the_defaults():
    found = MatryoshkaSettings((0.5,))
    assert (found.kl_weight, found.ce_weight, found.drops) == (0.25, 0.75, 1)
    assert found.training == TrainSettings(lr_u=1e-3)
    assert isinstance(drawn(model())[0], Projections) and shape_of(model()) == SHAPE
