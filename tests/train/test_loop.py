"""Whole trainings of a tiny model: what they lead to, and that nothing stops them half way."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.dynakv.adapter import RECORD, TENSORS, load_adapter
from kvjax.dynakv.settings import SpectralSettings
from kvjax.errors import CapacityError, NumericalError, UsageError
from kvjax.train.checkpoints import Checkpoints
from kvjax.train.dynakv import state as state_module
from kvjax.train.dynakv.loop import CHECKPOINTS, train
from kvjax.train.dynakv.metrics import METRICS, draw, read
from tests.dynakv.tiny import run, tiny
from tests.train.small import LOOSE, SETTINGS, rows


def events(folder, settings=SETTINGS, spectral=LOOSE, *, stop_after=None, lm=None, **options):
    """All events of a training; one that is to stop after a step is left as if it were killed."""
    found = []
    devices = options.pop("devices", jax.devices()[:1])
    for event in train(
        lm or tiny(), rows(), spectral, settings, folder, devices=devices, **options
    ):
        found.append(event)
        if stop_after is not None and event.kind == "step" and event.step == stop_after:
            break
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A training that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, events(folder)


def adapter_files(folder) -> list[bytes]:
    return [(folder / name).read_bytes() for name in (TENSORS, RECORD)]


def records(folder) -> list[dict]:
    """Of the metrics, without what a clock says."""
    return [{k: v for k, v in r.items() if k != "seconds"} for r in read(folder / METRICS)]


def test_a_training_leaves_an_adapter_and_what_happened(whole):
    folder, found = whole
    assert [event.step for event in found if event.kind == "step"] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in found if event.kind == "eval"] == [0, 2, 3, 4, 6]
    assert [event.step for event in found if event.kind == "save"] == [0, 3, 6]
    assert found[-1].kind == "done"
    adapter = load_adapter(folder, tiny())
    assert adapter.measured == found[-1].adapter.measured
    assert adapter.training["step"] == 6 and adapter.training["tokens"] == 6 * 4 * 12
    assert adapter.measured["rate_hard"] < 1 and adapter.measured["condition"] < 10
    assert np.isclose(np.mean(adapter.measured["rate_by_layer"]), adapter.measured["rate_hard"])
    steps = [record for record in records(folder) if record["kind"] == "step"]
    assert {"loss", "ce", "rate_soft", "rate_hard", "alpha", "gradient_norm"} < set(steps[0])
    assert steps[-1]["rate_soft"] < steps[0]["rate_soft"]
    assert draw(read(folder / METRICS), "title").startswith(b"\x89PNG")


@pytest.mark.parametrize("stop_after", [1, 4])
def test_a_killed_training_goes_on_as_if_nothing_had_been(whole, tmp_path, stop_after):
    events(tmp_path, stop_after=stop_after)
    assert not (tmp_path / TENSORS).exists()
    found = events(tmp_path, resume=True)
    first = next(event.step for event in found if event.kind == "step")
    assert first == {1: 1, 4: 4}[stop_after]
    assert adapter_files(tmp_path) == adapter_files(whole[0])
    assert records(tmp_path) == records(whole[0])


def test_an_interrupted_training_stops_with_a_checkpoint(whole, tmp_path):
    asked = iter([False, False, True])
    found = events(tmp_path, should_stop=lambda: next(asked))
    assert (found[-1].kind, found[-1].step) == ("interrupted", 2)
    found = events(tmp_path, resume=True)
    assert next(event.step for event in found if event.kind == "step") == 3
    assert adapter_files(tmp_path) == adapter_files(whole[0])


def test_a_finished_training_is_only_written_again(whole):
    folder, _ = whole
    before = adapter_files(folder)
    found = events(folder, resume=True)
    assert not any(event.kind == "step" for event in found)
    assert adapter_files(folder) == before


def test_best_and_last_checkpoints_stay(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step, score in enumerate([5.0, 1.0, 3.0, 2.0]):
            checkpoints.save(step, {"a": np.full(3, step, np.float32)}, score)
        assert (checkpoints.best, checkpoints.last) == (1, 3)
    with Checkpoints(tmp_path) as checkpoints:
        kept = sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
        assert kept == [1, 3]
        assert (checkpoints.best, checkpoints.last) == (1, 3)
        like = {"a": np.zeros(3, np.float32)}
        np.testing.assert_array_equal(checkpoints.load(1, like)["a"], [1, 1, 1])
        with pytest.raises(UsageError, match="checkpoint of step 2 cannot be read"):
            checkpoints.load(2, like)


def test_another_run_is_not_resumed(whole):
    folder, _ = whole
    with pytest.raises(UsageError, match="holds a run already: resume it, or name another"):
        events(folder)
    other = dataclasses.replace(SETTINGS, lr_u=1e-5)
    with pytest.raises(UsageError, match=r"with lr_u 0\.0003 and not 1e-05: it cannot be resumed"):
        events(folder, other, resume=True)
    with pytest.raises(UsageError, match="with fingerprint"):
        events(folder, resume=True, lm=dataclasses.replace(tiny(), fingerprint="other"))
    with pytest.raises(UsageError, match="with devices 1 and not 4"):
        events(folder, resume=True, devices=jax.devices())


def test_a_loss_that_is_no_number_stops_and_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    update, calls = state_module.Trainer.update, []

    def breaking(self, state, *batch):
        state, found = update(self, state, *batch)
        calls.append(1)
        return state, found | ({"loss": np.float32("nan")} if len(calls) == 5 else {})

    monkeypatch.setattr(state_module.Trainer, "update", breaking)
    with pytest.raises(NumericalError, match=r"loss is nan in step 5; the checkpoint of step 3"):
        events(tmp_path)
    with Checkpoints(tmp_path / CHECKPOINTS) as checkpoints:
        assert checkpoints.last == 3
    assert [r["step"] for r in records(tmp_path) if r["kind"] == "step"] == [1, 2, 3, 4]


def test_what_cannot_be_trained_is_refused(whole, tmp_path):
    shared = dataclasses.replace(SETTINGS, share_ranks="fisher")
    with pytest.raises(UsageError, match="share_ranks fisher has no effect where an adapter"):
        events(tmp_path, shared, start=load_adapter(whole[0], tiny()).spectra)
    with pytest.raises(CapacityError, match="seq_len 129 exceeds the model's context of 128"):
        events(tmp_path, dataclasses.replace(SETTINGS, seq_len=129))
    with pytest.raises(UsageError, match="batch_size 6 must be a multiple of the 4 devices"):
        events(tmp_path, dataclasses.replace(SETTINGS, batch_size=6), devices=jax.devices())
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot use"):
        events(tmp_path / "file")


@pytest.mark.slow
@pytest.mark.parametrize(
    "spectral",
    [
        SpectralSettings(gate="fixed", key_rank=8, value_rank=4),
        SpectralSettings(gate="layer", tilt=4.0),
    ],
)
def test_the_controls_are_trained_by_the_same_code(tmp_path, spectral):
    found = events(tmp_path, dataclasses.replace(SETTINGS, steps=2), spectral)
    measured = found[-1].adapter.measured
    if spectral.gate == "fixed":
        assert (measured["rate_keys"], measured["rate_values"]) == (8 / 16, 4 / 16)
        assert measured["rate_soft"] == measured["rate_hard"]
    record = json.loads((tmp_path / RECORD).read_text())
    assert record["spectral"]["gate"] == spectral.gate


@pytest.mark.slow
def test_no_steps_leave_the_principal_components(tmp_path):
    fixed = SpectralSettings(gate="fixed", key_rank=8, value_rank=8)
    found = events(tmp_path, dataclasses.replace(SETTINGS, steps=0), fixed)
    u = np.asarray(found[-1].adapter.spectra.layers[0].keys.u[...])
    np.testing.assert_allclose(u.T @ u, np.eye(16), atol=1e-5)
    assert found[-1].adapter.measured["ce_hard"] > found[-1].adapter.measured["ce_plain"]


@pytest.mark.slow
def test_a_larger_alpha_gives_a_smaller_rate(tmp_path):
    settings = dataclasses.replace(SETTINGS, steps=60, save_every=60, eval_every=60)
    rates = []
    for alpha in (0.0, 1.0, 10.0):
        found = events(tmp_path / str(alpha), dataclasses.replace(settings, alpha=alpha))
        rates.append(found[-1].values["rate_soft"])
        assert found[-1].values["condition"] < 1e3 and found[-1].values["inverse_error"] < 1e-3
    assert rates[0] > rates[1] > rates[2] and rates[0] > 0.5


@pytest.mark.slow
def test_a_target_rate_is_reached(tmp_path):
    settings = dataclasses.replace(
        SETTINGS, steps=200, save_every=200, eval_every=200, alpha=None, target_rate=0.4
    )
    found = events(tmp_path, settings, SpectralSettings())
    assert abs(found[-1].values["rate_hard"] - 0.4) < 0.04


def test_what_is_measured_is_the_hard_mask_on_held_out_rows(whole):
    adapter = load_adapter(whole[0], tiny())
    ids = rows().tokens[-SETTINGS.eval_rows :]
    for mode in ("soft", "hard"):
        logits, (soft, hard) = run(tiny().model, adapter.spectra, jnp.asarray(ids), mode=mode)
        logs = jax.nn.log_softmax(logits[:, :-1])
        own = jnp.take_along_axis(logs, jnp.asarray(ids)[:, 1:, None], -1)
        np.testing.assert_allclose(adapter.measured[f"ce_{mode}"], -own.mean(), rtol=1e-5)
    expected = {
        "rate_soft": soft,
        "rate_hard": hard,
        "rate_keys": hard[:, 0],
        "rate_values": hard[:, 1],
        "rate_without_first": hard[..., 1:],
    }
    for name, part in expected.items():
        np.testing.assert_allclose(adapter.measured[name], part.mean(), rtol=1e-5)


@pytest.mark.parametrize(("harden", "expected"), [(0.5, [0, 0, 0, 1, 1, 1]), (1.0, [0] * 6)])
def test_the_mask_hardens_when_the_share_of_steps_is_over(tmp_path, monkeypatch, harden, expected):
    update, found = state_module.Trainer.update, []

    def watched(self, state, tokens, valid, sharp):
        found.append(int(sharp))
        return update(self, state, tokens, valid, sharp)

    monkeypatch.setattr(state_module.Trainer, "update", watched)
    events(tmp_path, dataclasses.replace(SETTINGS, harden=harden))
    assert found == expected
