"""The command as a process of its own: signals, pipes, terminals and full disks."""

import contextlib
import json
import os
import pathlib
import pty
import signal
import subprocess
import sys
import time

import pytest

import kvjax
from kvjax.command.interrupt import Interrupts

ENDLESS = ("-p", "hello", "--max-new-tokens", "4000", "--no-repetition-stop")
STUCK = """
import sys, time, kvjax
from kvjax.decode import main
def stuck(*_, **__):
    print("stuck", file=sys.stderr, flush=True)
    time.sleep(60)
def stream(*_, **__):
    yield stuck()
kvjax.{name} = {replacement}
sys.exit(main())
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> pathlib.Path:
    """Compiled programs are shared by the runs of this module."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def start(model, cache):
    """Start the command; it is ended with the test."""
    started = []

    def run(
        *argv: str, code: str | None = None, kept=cache, env=None, **options
    ) -> subprocess.Popen:
        program = ["-m", "kvjax.decode"] if code is None else ["-c", code]
        environment = os.environ | {"XDG_CACHE_HOME": str(kept), "JAX_PLATFORMS": "cpu"}
        environment["PYTHONUNBUFFERED"] = ""  # buffers are what fails a second time at exit
        environment |= env or {}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        command = [sys.executable, *program, "--model", str(model), *argv]
        started.append(subprocess.Popen(command, env=environment, text=True, **options))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_an_interrupt_keeps_what_there_is(start):
    process = start(*ENDLESS, "--stream", "--stats")
    first = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first) == 20 and rest.endswith("\n")
    assert "Traceback" not in err
    stopping, prompt = err.strip().splitlines()[:2]
    assert stopping.startswith("kvjax: stopping")
    assert prompt.endswith("interrupted")


def test_a_second_interrupt_ends_at_once(start, tmp_path):
    code = STUCK.format(name="stream", replacement="stream")
    process = start(*ENDLESS, "-o", str(tmp_path / "out.json"), "--format", "json", code=code)
    assert process.stderr.readline() == "stuck\n"
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "\n"
    assert process.stderr.readline().startswith("kvjax: stopping")
    sent = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - sent < 10
    assert err == "\nkvjax: interrupted\n"
    assert os.listdir(tmp_path) == []


def test_an_interrupt_while_loading_ends_at_once(start, tmp_path):
    code = STUCK.format(name="load", replacement="stuck")
    process = start(*ENDLESS, "-o", str(tmp_path / "out.jsonl"), code=code)
    assert process.stderr.readline() == "stuck\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "\nkvjax: interrupted\n")
    assert os.listdir(tmp_path) == []


def test_being_terminated_is_being_interrupted(start, tmp_path):
    code = STUCK.format(name="stream", replacement="stream")
    process = start(*ENDLESS, "-o", str(tmp_path / "out"), code=code)
    assert process.stderr.readline() == "stuck\n"
    for line in ("\n", "kvjax: stopping (Ctrl-C again: at once)\n"):
        if line == "\n":
            process.terminate()
        assert process.stderr.readline() == line
    process.terminate()
    assert process.communicate(timeout=60) == ("", "\nkvjax: interrupted\n")
    assert process.returncode == 130
    assert os.listdir(tmp_path) == []


def test_a_log_that_cannot_be_written_takes_no_answer_with_it(start):
    with open("/dev/full", "w") as full:
        process = start("-p", "hello", "--max-new-tokens", "6", "--stats", stderr=full)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert len(out.strip()) > 0


@pytest.mark.parametrize("action", ["--plan", "--print-config"])
def test_a_full_disk_is_one_line_for_all_that_is_printed(start, action):
    with open("/dev/full", "w") as full:
        process = start(action, stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err == "kvjax: cannot write standard output: No space left on device\n"


def test_answers_are_utf8_whatever_the_locale(start, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "é日", "prompt": "hello"}', encoding="utf-8")
    process = start(
        *("--prompts", str(rows), "--max-new-tokens", "6"), env={"PYTHONIOENCODING": "ascii"}
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["id"] == "é日"


@pytest.mark.parametrize("name", ["bogus", "cuda"])
def test_a_platform_that_jax_cannot_use_is_one_line(start, name):
    process = start("-p", "hello", env={"JAX_PLATFORMS": name})
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err.startswith(f"kvjax: JAX cannot use JAX_PLATFORMS='{name}'")
    assert err.count("\n") == 1


def test_a_closed_pipe_ends_quietly(start):
    process = start(*ENDLESS, "--stream")
    process.stdout.read(5)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 0


def test_a_full_disk_is_one_line(start):
    with open("/dev/full", "w") as full:
        process = start("-p", "hello", "--max-new-tokens", "6", stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err == "kvjax: cannot write standard output: No space left on device\n"


def test_a_terminal_gets_progress_text_and_figures(start):
    main_end, terminal = pty.openpty()
    process = start("-p", "hello", "--max-new-tokens", "40", stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while piece := os.read(main_end, 4096):
            shown += piece
    os.close(main_end)
    assert process.wait(timeout=60) == 0
    progress, text = shown.decode().rsplit("\x1b[K", 1)
    assert "\rloading " in progress and "\rprefill " in progress
    answer, figures = text.split("\r\n", 1)
    assert len(answer) == 40
    assert figures.startswith("prompt 10 tokens, ") and figures.count("\r\n") == 3


def test_the_second_run_finds_its_programs_compiled(start, tmp_path):
    compiled = []
    for _ in range(2):
        process = start("-p", "hello", "--format", "json", kept=tmp_path)
        out, err = process.communicate(timeout=60)
        assert err == ""
        compiled.append(json.loads(out)["timing"]["compile_s"])
    assert compiled[1] < compiled[0] / 2


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_an_interrupted_record_says_so(decode, monkeypatch, tmp_path, form):
    stream = kvjax.stream

    def interrupted(*args, **options):
        for event in stream(*args, **options):
            if event.kind == "text":
                os.kill(os.getpid(), signal.SIGINT)
                while not options["should_stop"]():
                    time.sleep(0.001)
            yield event

    monkeypatch.setattr(kvjax, "stream", interrupted)
    outcome = decode(*ENDLESS, "--format", form, "-o", tmp_path / "out")
    assert outcome.code == 130
    record = json.loads((tmp_path / "out").read_text())
    assert record["finish_reason"] == "interrupted"
    assert 0 < record["usage"]["generated"] < 100 and record["text"]


def test_a_device_that_is_full_is_one_line(decode):
    outcome = decode("-p", "hello", "--max-new-tokens", "6", "-o", "/dev/full")
    assert outcome.code == 2
    assert outcome.err == (
        "kvjax: cannot write /dev/full: No space left on device; the answer is on standard output\n"
    )


def test_interrupts_leave_the_handler_as_it_was():
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        interrupts.wait_for_answers()
        assert not interrupts.requested()
        os.kill(os.getpid(), signal.SIGINT)
        while not interrupts.requested():
            time.sleep(0.001)
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.set_wakeup_fd(-1) == -1
