"""The calibrate command as a process of its own: killed, interrupted, and going on."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from kvjax.thoughts.calibration import Calibration

# 1,200 tokens take long enough to be interrupted in.
LONG = ("--max-new-tokens", "1200", "--batch-size", "1", "--limit", "3")


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> pathlib.Path:
    """Compiled programs are shared by the runs of this module."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def start(model, cache, prompts):
    """Start the command; it is ended with the test."""
    started = []

    def run(out: pathlib.Path) -> subprocess.Popen:
        environment = os.environ | {"XDG_CACHE_HOME": str(cache), "JAX_PLATFORMS": "cpu"}
        named = ("--model", str(model), "--prompts", str(prompts), "--out", str(out))
        command = [sys.executable, "-m", "kvjax.calibrate", *named, *LONG]
        started.append(
            subprocess.Popen(
                command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def until_first_sample(process: subprocess.Popen, out: pathlib.Path) -> pathlib.Path:
    folder = out.with_name(out.name + ".samples")
    deadline = time.monotonic() + 120
    while not list(folder.glob("*.npy")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return folder


@pytest.mark.slow
def test_killed_or_interrupted_a_run_goes_on_to_the_same_result(start, tmp_path):
    whole, killed, interrupted = (tmp_path / f"{name}.json" for name in "abc")
    process = start(whole)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err

    process = start(killed)
    folder = until_first_sample(process, killed)
    process.kill()
    process.communicate()
    assert not killed.exists() and len(list(folder.glob("*.npy"))) < 3
    process = start(killed)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0 and "kvjax: going on after " in err
    assert killed.read_bytes() == whole.read_bytes() and not folder.exists()

    process = start(interrupted)
    folder = until_first_sample(process, interrupted)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (130, "") and "Traceback" not in err
    assert "kvjax: interrupted after " in err and "goes on from there" in err
    assert not interrupted.exists()
    process = start(interrupted)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0 and "kvjax: going on after " in err
    assert interrupted.read_bytes() == whole.read_bytes() and not folder.exists()
    assert Calibration.load(whole).prompts == 3


def test_an_interrupt_before_there_is_anything_ends_at_once(start, tmp_path):
    process = start(tmp_path / "c.json")
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]
