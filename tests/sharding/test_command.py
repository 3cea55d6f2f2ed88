"""``--tp`` and ``--dp``, and several processes that share a file of prompts."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest

from kvjax.report.units import read_size
from tests.cli.conftest import decode, model

__all__ = ["decode", "model"]
PROMPTS = [{"id": i, "prompt": "tell me " + "more " * i} for i in range(5)]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


def test_plan_is_of_one_device(decode):
    def read(*flags):
        lines = decode("--plan", "--batch-size", 8, *flags).out.splitlines()
        return dict(re.split(r"  +", line, maxsplit=1) for line in lines)

    one, two, four = read(), read("--tp", 2), read("--tp", 2, "--dp", 4)
    assert "devices" not in one
    assert two["devices"] == "2 share the heads; bytes are of each"
    for name, share in (("pools", 0.51), ("weights", 0.6)):
        many, alone = (read_size(plan[name].replace(" ", ""), name) for plan in (two, one))
        assert many < share * alone
    assert four["groups of devices"] == "4, each with all of this"
    assert (one["rows"], two["rows"], four["rows"]) == ("8", "8", "2")


@pytest.mark.slow
def test_answers_are_those_of_one_device(decode, prompts):
    flags = ("--prompts", prompts, "--max-new-tokens", 12, "--batch-size", 2)
    alone, spread = decode(*flags), decode(*flags, "--tp", 2, "--dp", 2)
    assert alone.code == spread.code == 0
    assert texts(alone.out) == texts(spread.out)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tp", 3), "--tp 3 does not divide the model's 2 KV heads"),
        (("--tp", 2, "--dp", 3), "--tp 2 times dp 3 is 6 devices, and this process has 4"),
        (("--tp", 4, "--method", "rkv"), "--tp 4 is more than the model's 2 KV heads"),
        (("--num-processes", 2), "--num-processes needs --coordinator HOST:PORT"),
        (("--coordinator", "a:1"), "--coordinator a:1 needs --num-processes as well"),
        (
            ("--coordinator", "a:1", "--num-processes", 2, "--process-id", 2),
            "--process-id must be below --num-processes 2, got 2",
        ),
        (("--coordinator", "auto"), "shares out the prompts of a file: give --prompts FILE"),
    ],
)
def test_what_cannot_work_is_refused(decode, flags, message):
    outcome = decode("-p", "a", *flags)
    assert outcome.code == 2 and message in outcome.err


@pytest.mark.slow
@pytest.mark.parametrize("after", [(), ("--tp", 4)])
def test_a_saved_cache_goes_on_with_other_devices(decode, after, tmp_path):
    path, form = tmp_path / "cache", ("--format", "json", "--greedy")
    whole = decode("-p", "tell me", *form, "--max-new-tokens", 30)
    first = decode("-p", "tell me", *form, "--max-new-tokens", 17, "--tp", 2, "--save-cache", path)
    on = decode("--load-cache", path, *form, "--max-new-tokens", 13, *after)
    assert first.code == on.code == 0, on.err
    said = (json.loads(outcome.out)["text"] for outcome in (first, on))
    assert "".join(said) == json.loads(whole.out)["text"]


def texts(lines: str) -> dict[int, str]:
    rows = map(json.loads, lines.splitlines())
    return {row["id"]: row["text"] for row in rows}


@pytest.mark.slow
def test_processes_share_the_prompts(decode, model, prompts, tmp_path):
    """Each reads its own and writes a file of its own."""
    flags = ["--prompts", str(prompts), "--max-new-tokens", "12", "--batch-size", "2"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "kvjax.decode", "--model", str(model), *flags]
    command += ["-o", str(tmp_path / "answers.jsonl"), "--coordinator", f"localhost:{port}"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [*command, "--num-processes", "2", "--process-id", str(i)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], errors
    found = [texts((tmp_path / f"answers.{i}.jsonl").read_text()) for i in range(2)]
    assert [sorted(part) for part in found] == [[0, 2, 4], [1, 3]]
    assert found[0] | found[1] == texts(decode(*flags).out)
