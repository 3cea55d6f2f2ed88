"""Files that answers go to."""

import json
import os
import resource
import signal

import pytest

import kvjax
from kvjax.command.output import open_output
from kvjax.errors import UsageError


@pytest.mark.parametrize("growing", [True, False])
def test_a_finished_file_holds_what_was_written(tmp_path, growing):
    path = tmp_path / "out"
    path.write_text("old and longer than the new content")
    path.chmod(0o640)
    output = open_output(str(path), growing=growing)
    output.write("one\n")
    output.write("two é\n")
    output.close(complete=True)
    assert path.read_text() == "one\ntwo é\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("growing", [True, False])
def test_a_run_that_fails_first_leaves_the_old_file(tmp_path, growing):
    path = tmp_path / "out"
    path.write_text("old")
    open_output(str(path), growing=growing).close(complete=False)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("growing", [True, False])
def test_a_run_that_fails_first_leaves_no_new_file(tmp_path, growing):
    open_output(str(tmp_path / "out"), growing=growing).close(complete=False)
    assert os.listdir(tmp_path) == []


def test_a_growing_file_has_each_row_at_once(tmp_path):
    output = open_output(str(tmp_path / "out"), growing=True)
    output.write("one\n")
    assert (tmp_path / "out").read_text() == "one\n"
    output.close(complete=False)
    assert (tmp_path / "out").read_text() == "one\n"


def test_a_link_still_leads_to_the_file(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    output = open_output(str(tmp_path / "link"), growing=False)
    output.write("text")
    output.close(complete=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"


def test_a_device_is_written_to_and_not_replaced():
    output = open_output(os.devnull, growing=False)
    output.write("text")
    output.close(complete=True)
    assert not os.path.isfile(os.devnull)


@pytest.mark.parametrize("growing", [True, False])
@pytest.mark.parametrize("name", ["no/such/folder", ".", "a\0b", "x" * 300])
def test_an_output_that_cannot_be_opened_is_refused(tmp_path, growing, name):
    with pytest.raises(UsageError, match="--output: cannot write"):
        open_output(f"{tmp_path}/{name}", growing=growing)


def test_an_input_is_not_overwritten(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("{}")
    with pytest.raises(UsageError, match="is also an input"):
        open_output(f"{tmp_path}/./rows.jsonl", growing=True, inputs=(str(path),))


@pytest.fixture
def small_files():
    """Files of at most 100 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_keeps_the_rows_before(tmp_path, small_files):
    path = tmp_path / "out"
    output = open_output(str(path), growing=True)
    output.write("a" * 79 + "\n")
    with pytest.raises(UsageError, match=r"cannot write .*out: File too large"):
        output.write("b" * 79 + "\n")
    output.close(complete=False)
    assert path.read_text() == "a" * 79 + "\n"


def test_a_full_disk_keeps_the_old_file(tmp_path, small_files):
    path = tmp_path / "out"
    path.write_text("old")
    output = open_output(str(path), growing=False)
    with pytest.raises(UsageError, match="File too large"):
        output.write("b" * 200)
    output.close(complete=False)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_the_model_is_not_overwritten(decode, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    outcome = decode("-p", "hello", "-o", file, model=file)
    assert outcome.code == 2 and "also an input" in outcome.err
    assert file.read_bytes() == b"weights"


def test_the_file_of_options_is_not_overwritten(decode, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("max_new_tokens: 3\n")
    outcome = decode("--config", file, "-p", "hello", "-o", file)
    assert outcome.code == 2 and "also an input" in outcome.err
    assert file.read_text() == "max_new_tokens: 3\n"


def test_a_file_of_the_model_directory_is_not_overwritten(decode, model):
    before = (model / "config.json").read_bytes()
    outcome = decode("-p", "hello", "-o", model / "config.json")
    assert outcome.code == 2 and "also an input" in outcome.err
    assert (model / "config.json").read_bytes() == before


def test_closed_standard_output_is_one_line(decode, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", None)
        outcome = decode("-p", "hello")
    assert outcome.code == 2 and "standard output is closed" in outcome.err


@pytest.mark.parametrize("listed", [False, True], ids=["stdout", "file"])
def test_answers_before_a_failure_are_kept(decode, tmp_path, monkeypatch, listed):
    """Here the second batch fails as if the device were full."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"id": {i}, "prompt": "hello"}}\n' for i in range(2)))
    whole = kvjax.decoding.stream

    def failing(*args, **options):
        done = 0
        for event in whole(*args, **options):
            yield event
            done += event.kind == "done"
            if done:
                raise RuntimeError("INTERNAL: Out of memory allocating 52899200072 bytes")

    monkeypatch.setattr("kvjax.stream", failing, raising=False)
    file = tmp_path / "answers.json"
    extra = ["-o", file] if listed else []
    outcome = decode(
        "--prompts", rows, "--format", "json", "--batch-size", 1, "--max-new-tokens", 3, *extra
    )
    assert outcome.code == 4 and "out of memory" in outcome.err
    content = file.read_text() if listed else outcome.out
    assert [row["id"] for row in json.loads(content)] == [0]
