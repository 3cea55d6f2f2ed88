"""The reasoner's command: what it refuses, and that no trained model is lost."""

import dataclasses
import pathlib
import signal

import numpy as np
import pytest

from kvjax.models.config import ModelConfig
from kvjax.train.claim import claim
from kvjax.train.reasoner import __main__ as command
from kvjax.train.reasoner import loop
from kvjax.train.reasoner.model import CONFIG, init

TINY = {**CONFIG, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run the command on a model that is not trained: its exit code, its message, the trainings."""
    trainings = []

    def train(settings, **options):
        trainings.append((settings, options))
        params = init(ModelConfig.from_hf(TINY), 0)
        tiny = dataclasses.replace(settings, config=TINY)
        return tiny, {"params": params, "step": np.int32(settings.steps)}

    def start(*argv: object):
        words = ["--out", tmp_path / "model", *argv]
        code = command.main([*map(str, words)])
        return code, capsys.readouterr().err, trainings

    monkeypatch.setattr(command, "train", train)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield start
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_model_is_exported(run, tmp_path):
    code, said, _ = run("--steps", 3)
    assert code == 0 and "the model after 3 of 3 steps" in said
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_out_is_looked_at_before_training(run, tmp_path):
    (tmp_path / "file").write_text("")
    code, said, trainings = run("--steps", 3, "--out", tmp_path / "file")
    assert code == 2 and said.startswith("error: --out: cannot write ") and not trainings
    assert said.count("\n") == 1


def test_a_model_that_cannot_be_written_is_kept_elsewhere(run, tmp_path, monkeypatch):
    real = command.export

    def full(directory, *rest):
        if directory == tmp_path / "model":
            raise OSError(28, "No space left on device")
        real(directory, *rest)

    monkeypatch.setattr(command, "export", full)
    monkeypatch.setattr(command.tempfile, "tempdir", str(tmp_path))
    code, said, _ = run("--steps", 3)
    [spare] = tmp_path.glob("reasoner-*")
    assert code == 2 and said.count("\n") == 1
    assert f"model: No space left on device; the model is in {spare}" in said
    assert (spare / "config.json").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_an_old_model_stays_whole_when_a_new_one_is_cut_short(run, tmp_path, monkeypatch, name):
    assert run("--steps", 3)[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}

    def breaking(real):
        def write(path, content, **options):
            if name not in path.name:
                return real(path, content, **options)
            real(path, content[: len(content) // 2], **options)
            raise OSError(28, "No space left on device")

        return write

    monkeypatch.setattr(command.tempfile, "tempdir", str(tmp_path))
    for way in ("write_bytes", "write_text"):
        monkeypatch.setattr(pathlib.Path, way, breaking(getattr(pathlib.Path, way)))
    code, said, _ = run("--steps", 3)
    assert code == 2 and "cannot write" in said and "the model is in" not in said
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--steps", 0), "--steps must be a whole number, at least 1, got 0"),
        (("--seconds", -5), "--seconds must be above 0 and finite, got -5.0"),
        (("--seconds", "nan"), "--seconds must be above 0"),
        (("--steps", 3, "--every", 0), "--every must be at least 1, got 0"),
        (("--steps", 3, "--workers", -1), "--workers must be at least 0, got -1"),
        (("--steps", 3, "--warmup", -1), "--warmup must be a whole number, at least 0, got -1"),
        (("--steps", 3, "--batch-tokens", 0), "--batch-tokens must be a whole number, at least 1"),
        (("--steps", 3, "--learning-rate", "inf"), "--learning-rate must be above 0 and finite"),
        (("--steps", 3, "--seed", -1), "--seed must be a whole number, at least 0, got -1"),
    ],
)
def test_numbers_that_cannot_be_are_refused(run, tmp_path, argv, message):
    code, said, trainings = run(*argv)
    assert code == 2 and said.startswith(f"error: {message}") and said.count("\n") == 1
    assert not trainings and not (tmp_path / "model").exists()


def test_another_training_is_refused_by_its_flag(run, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "train", loop.train)
    claim(tmp_path / "kept", dataclasses.asdict(loop.Settings(steps=3)), resume=False)
    code, said, _ = run("--steps", 3, "--checkpoints", tmp_path / "kept", "--learning-rate", 1)
    assert code == 2 and "kept holds a run with --learning-rate 0.002 and not 1.0" in said
    assert said.count("\n") == 1


def test_levels_may_be_named_in_any_order(run):
    assert run("--steps", 3, "--levels", 500, 200, 500)[2][0][0].levels == (200, 500)
