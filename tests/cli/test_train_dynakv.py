"""The train_dynakv command: its files, its messages, and that being killed costs it nothing."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from kvjax.train.claim import claim
from kvjax.train.dynakv.data import Rows
from kvjax.train.dynakv.loop import Event, identity_of
from kvjax.train_dynakv import main
from tests.cli.conftest import Outcome

SHORT = ("--seq-len", 16, "--batch-size", 4, "--grad-accum", 1, "--eval-rows", 4)


@pytest.fixture
def data(tmp_path) -> pathlib.Path:
    path = tmp_path / "text.txt"
    words = np.random.default_rng(0).choice(["tree", "of", "the", "blue", "whale"], 400)
    path.write_text(" ".join(words))
    return path


@pytest.fixture
def train(model, data, tmp_path, capsys, monkeypatch):
    """Run the command on the small model in this process, as one with a single device."""
    monkeypatch.setattr("kvjax.command.train_dynakv_run.keep_compiled_programs", lambda: None)

    def run(*argv: object, defaults: bool = True) -> Outcome:
        named = ["--model", model, "--data", data, "--out", tmp_path / "out", *SHORT]
        code = main([*map(str, named if defaults else ()), *map(str, argv)])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


def test_a_run_leaves_an_adapter(train, tmp_path):
    fixed = ("--gate", "fixed", "--key-rank", 8, "--value-rank", 4)
    found = train("--steps", 0, *fixed)
    assert found.code == 0 and found.out == ""
    assert "at a rate of 0.375 (keys 0.500, values 0.250" in found.err
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {
        "adapter.json",
        "adapter.safetensors",
        "checkpoints",
        "metrics.jsonl",
        "run.json",
        "training.png",
    }
    record = json.loads((out / "adapter.json").read_text())
    assert record["spectral"]["key_rank"] == 8 and record["training"]["seq_len"] == 16
    assert record["measured"]["ce_hard"] > 0
    again = train("--steps", 0, *fixed)
    assert again.code == 2 and "holds a run already" in again.err
    other = train("--adapter", out, "--out", tmp_path / "other")
    assert other.code == 2
    assert "--adapter: " in other.err and "--gate fixed and not token" in other.err
    other = train("--adapter", out, *fixed, "--share-ranks", "fisher", "--out", tmp_path / "other")
    assert other.code == 2 and "--share-ranks fisher has no effect where an adapter" in other.err


def test_options_can_be_printed_and_read_back(train, tmp_path):
    found = train("--target-rate", "0.3", "--print-config")
    assert found.code == 0
    (tmp_path / "options.yaml").write_text(found.out)
    again = train("--config", tmp_path / "options.yaml", "--print-config", defaults=False)
    assert again.out == found.out and "target_rate: 0.3" in found.out


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (("--alpha", 1, "--target-rate", 0.5), 2, "--alpha and --target-rate exclude each other"),
        (("--alpha", -1), 2, "--alpha must be at least 0"),
        (("--target-rate", 0), 2, "--target-rate must be above 0"),
        (("--target-rate", 1), 2, "--target-rate must be between 0 and 1"),
        (("--self-data", 8), 2, "--data and --self-data exclude each other"),
        (("--gate", "fixed"), 2, "--key-rank must be a whole number above 0 with a fixed gate"),
        (("--key-rank", 4), 2, "--key-rank must be left out"),
        (("--gate", "fixed", "--key-rank", 17, "--value-rank", 1), 2, "--key-rank must be at most"),
        (("--gate", "fixed", "--target-rate", 0.5), 2, "--target-rate has no effect"),
        (("--gate", "fixed", "--harden", 0.5), 2, "--harden has no effect"),
        (("--harden", 1.5), 2, "--harden must be at least 0 and at most 1"),
        (("--trains", "all", "--dtype", "bfloat16"), 2, "--trains all needs --dtype float32"),
        (("--batch-size", 6), 2, "--batch-size 6 must be a multiple of the 4 devices"),
        (("--seq-len", 1 << 17), 4, "--seq-len 131072 exceeds the model's context"),
        (("--seq-len", 4096), 2, "--data: the data makes 1 rows of --seq-len 4096"),
        (("--lr-u", 0), 2, "--lr-u must be above 0"),
        (("--tau", 1), 2, "--tau must be from 0 to below 1"),
        (("--data", "none.txt"), 2, "--data: cannot read none.txt: No such file"),
        (("--adapter", "none"), 2, "--adapter: none: cannot read adapter.json: No such file"),
        (("--model", "none"), 3, "none: no such file"),
        (("--config", "none"), 2, "--config: cannot read none"),
        (("--step", 3), 2, "--step"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(train, tmp_path, argv, code, message):
    found = train(*argv)
    assert found.code == code
    assert found.out == "" and found.err.count("\n") == 1
    assert found.err.startswith("kvjax: ") and message in found.err
    assert not (tmp_path / "out" / "adapter.json").exists()


def test_there_has_to_be_data_and_a_place_for_the_adapter(train, model, data, tmp_path):
    named = ("--model", model)
    found = train(*named, "--data", data, defaults=False)
    assert found.code == 2 and "no output: name a folder for the adapter with --out" in found.err
    found = train(*named, "--out", tmp_path / "out", defaults=False)
    assert found.code == 2 and "no data: give --data or --self-data" in found.err
    found = train("--out", data)
    assert found.code == 2 and "is no folder" in found.err
    found = train("--out", model)
    assert found.code == 2 and "is also an input" in found.err


def test_a_damaged_adapter_is_refused_with_its_flag(train, tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "adapter.json").write_text("{")
    found = train("--adapter", tmp_path / "bad")
    assert found.code == 2
    assert "kvjax: --adapter: " in found.err and "adapter.json is not readable as JSON" in found.err


@pytest.fixture
def sampled(monkeypatch):
    """Nothing is decoded and nothing trained, but the folder is claimed; what was sampled."""
    asked = []

    def sample(lm, count, settings, **options):
        asked.append(count)
        ids = np.random.default_rng(count).integers(96, size=(count, settings.seq_len))
        return Rows(ids.astype(np.int32), np.ones(ids.shape, bool))

    def claims(lm, rows, spectral, settings, folder, *, resume, **options):
        claim(folder, identity_of(lm, rows, spectral, settings, jax.device_count()), resume)
        yield Event("interrupted")

    monkeypatch.setattr("kvjax.command.train_dynakv_run.sample_rows", sample)
    monkeypatch.setattr("kvjax.command.train_dynakv_run.train", claims)
    return asked


def test_sampled_rows_are_read_again_however_many_steps_need(train, model, tmp_path, sampled):
    out = tmp_path / "out"
    words = ("--model", model, "--out", out, *SHORT, "--steps", 1, "--calibration-tokens", 16)
    assert train(*words, "--self-data", 40, defaults=False).code == 130
    before = (out / "self_data.npy").read_bytes()
    found = train(*words, "--self-data", 40, "--resume", defaults=False)
    assert found.code == 130, found.err
    found = train(*words, "--self-data", 4000, "--resume", defaults=False)
    assert found.code == 2 and "with 40 sampled rows and not 4000: give --self-data 40" in found.err
    assert sampled == [40] and (out / "self_data.npy").read_bytes() == before


def test_a_folder_that_cannot_be_used_is_refused_before_rows_are_sampled(
    train, model, data, tmp_path, sampled
):
    out, common = tmp_path / "out", ("--model", model, *SHORT, "--steps", 1)
    words = (*common, "--self-data", 40, "--out", out)
    assert train(*words, defaults=False).code == 130
    (out / "self_data.npy").write_text("kept")
    found = train(*words, defaults=False)
    assert found.code == 2 and "holds a run already" in found.err
    assert (out / "self_data.npy").read_text() == "kept"
    (out / "self_data.npy").unlink()
    found = train(*words, "--resume", "--lr-u", 1, defaults=False)
    assert found.code == 2 and "a run with --lr-u 0.0003 and not 1.0" in found.err
    found = train(*common, "--self-data", 40, "--out", data / "below", defaults=False)
    assert found.code == 2 and "below: Not a directory" in found.err
    assert sampled == [40]


@pytest.mark.slow
def test_a_killed_process_goes_on_to_the_same_bytes(model, data, tmp_path):
    argv = ("--model", model, "--data", data, "--steps", 30, *SHORT)
    argv += ("--save-every", 5, "--eval-every", 5, "--tilt", 4, "--lr-gate", 0.02)
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}

    def start(out: str, *more: str) -> subprocess.Popen:
        words = [*argv, "--out", tmp_path / out, *more]
        command = [sys.executable, "-m", "kvjax.train_dynakv", *map(str, words)]
        return subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)

    assert start("whole").wait(300) == 0
    for signum, done in ((signal.SIGKILL, 7), (signal.SIGTERM, 18)):
        process = start("killed", "--resume")
        metrics = tmp_path / "killed" / "metrics.jsonl"
        while process.poll() is None:
            written = metrics.read_text() if metrics.exists() else ""
            if f'"step": {done}, "kind": "step"' in written:
                process.send_signal(signum)
                break
            time.sleep(0.002)
        assert process.wait(60) in (-signal.SIGKILL, 130)
    assert start("killed", "--resume").wait(300) == 0
    for name in ("adapter.safetensors", "adapter.json"):
        one, other = (tmp_path / folder / name for folder in ("whole", "killed"))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_rows_can_be_sampled_from_the_model(train, model, tmp_path):
    words = ("--model", model, "--self-data", 8, "--out", tmp_path / "out", *SHORT)
    found = train(*words, "--steps", 2, defaults=False)
    assert found.code == 0, found.err
    rows = np.load(tmp_path / "out" / "self_data.npy")
    assert rows.shape == (8, 16) and len({tuple(row) for row in rows}) == 8
    found = train(*words, "--steps", 2, "--resume", defaults=False)
    assert found.code == 0, found.err
