"""Files that answers go to."""

import json
import os
import pathlib
import resource
import signal

import pytest

import kvjax
from kvjax.command.files import check_apart
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


@pytest.mark.parametrize("old", [None, "old"])
def test_a_full_disk_keeps_the_rows_before(tmp_path, small_files, old):
    path = tmp_path / "out"
    if old:
        path.write_text(old)
    output = open_output(str(path), growing=True)
    output.write("a" * 79 + "\n")
    with pytest.raises(UsageError, match=r"cannot write .*out: File too large"):
        output.write("b" * 79 + "\n")
    output.close(complete=False)
    assert path.read_text() == "a" * 79 + "\n"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("growing", [True, False])
@pytest.mark.parametrize("complete", [True, False])
def test_a_full_disk_keeps_the_old_file(tmp_path, small_files, growing, complete):
    path = tmp_path / "out"
    path.write_text("old")
    output = open_output(str(path), growing=growing)
    with pytest.raises(UsageError, match="File too large"):
        output.write("b" * 200)
    output.close(complete=complete)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("growing", "kept", "shown"), [(True, "a" * 80, "b" * 80 + "c"), (False, None, None)]
)
def test_what_cannot_be_written_goes_to_standard_output(
    tmp_path, small_files, capsys, growing, kept, shown
):
    """Of a file that does not grow that is all: what was written before is lost with it."""
    path = tmp_path / "out"
    output = open_output(str(path), growing=growing)
    output.write("a" * 80)
    with pytest.raises(UsageError, match=r"File too large; the answer is on standard output$"):
        output.write("b" * 80)
    output.write("c")
    output.close(complete=True)
    assert capsys.readouterr().out == (shown or "a" * 80 + "b" * 80 + "c")
    assert (path.read_text() if path.exists() else None) == kept


def test_without_standard_output_a_failure_is_a_failure(tmp_path, small_files, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    output = open_output(str(tmp_path / "out"), growing=False)
    with pytest.raises(UsageError, match=r"File too large$"):
        output.write("b" * 200)
    output.close(complete=False)


def test_a_place_that_is_taken_at_the_end_leaves_the_answer_beside_it(tmp_path):
    path = tmp_path / "out"
    output = open_output(str(path), growing=False)
    output.write("text")
    path.mkdir()
    with pytest.raises(UsageError, match=r"cannot write .*; the answer is in (.*)$") as error:
        output.close(complete=True)
    assert pathlib.Path(str(error.value).rpartition(" ")[2]).read_text() == "text"


def test_what_a_killed_run_left_is_no_hindrance(tmp_path):
    """In a container the next run may well have the same number."""
    killed = open_output(str(tmp_path / "out"), growing=False)
    output = open_output(str(tmp_path / "out"), growing=False)
    output.write("text")
    for each in (killed, output):
        each.close(complete=True)


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


def test_no_input_is_overwritten(decode, tmp_path, monkeypatch, model):
    """Calibration, shares, the model where none is named; and by the picture neither."""
    file = tmp_path / "input.json"
    [shipped, *_] = (pathlib.Path(kvjax.__file__).parent / "thoughts/calibrations").glob("*.json")
    file.write_bytes(shipped.read_bytes())
    argv = ("-p", "hello", "--method", "thinkv", "--calibration", file)
    assert "also an input" in decode(*argv, "-o", file).err
    monkeypatch.setattr("kvjax.command.run.default_model_path", lambda: file)
    assert "also an input" in decode("-p", "hello", "-o", file, model=None).err
    shares = tmp_path / "shares.json"
    shares.write_text("[[1, 1]]")
    outcome = decode("-p", "hello", "--method", "h2o", "--head-shares", shares, "-o", shares)
    assert "also an input" in outcome.err and shares.read_text() == "[[1, 1]]"
    picture = tmp_path / "input.png"
    picture.write_text("prompt")
    outcome = decode("--prompt-file", picture, "--trace", picture)
    assert outcome.code == 2 and "--trace" in outcome.err and "also an input" in outcome.err
    assert file.read_bytes() == shipped.read_bytes() and picture.read_text() == "prompt"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("-o", "--save-cache"), "--save-cache and --output both name"),
        (("-o", "--trace"), "--trace and --output both name"),
        (("--save-cache", "--trace"), "--trace and --save-cache both name"),
    ],
)
@pytest.mark.parametrize("there", [False, True])
def test_two_outputs_are_two_files(decode, tmp_path, flags, message, there):
    """Through a link too, and before there is a file: else one takes the other's place."""
    path, link = tmp_path / "one.png", tmp_path / "link.png"
    if there:
        path.write_text("old")
    link.symlink_to(path)
    for second in (path, f"{tmp_path}/./one.png", link):
        outcome = decode("-p", "x", flags[0], path, flags[1], second, "--format", "jsonl")
        assert outcome.code == 2 and outcome.err.count("\n") == 1
        assert f"{message} {second}: name two files" in outcome.err
    assert path.exists() == there
    with pytest.raises(UsageError, match="--save-cache: cannot write"):
        check_apart({"--output": str(path), "--save-cache": "a\0b", "--trace": None})


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


def test_rows_that_waited_for_one_that_cannot_be_written_are_shown(decode, tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"id": {i}, "prompt": "hello"}}\n' for i in range(3)))
    whole = kvjax.decoding.stream

    def late(*args, **options):
        """The first row ends last."""
        done = [event for event in whole(*args, **options) if event.kind == "done"]
        yield from sorted(done, key=lambda event: -event.row)

    monkeypatch.setattr("kvjax.stream", late, raising=False)
    outcome = decode("--prompts", rows, "--max-new-tokens", 3, "-o", "/dev/full")
    assert outcome.code == 2
    assert [json.loads(line)["id"] for line in outcome.out.splitlines()] == [0, 1, 2]


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_answer_outlives_a_picture_that_cannot_be_written(decode, tmp_path, monkeypatch, form):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvjax.command.run.draw", full)
    outcome = decode(
        *("-p", "hello", "--max-new-tokens", 3, "-o", tmp_path / "out", "--format", form),
        *("--trace", tmp_path / "trace.png"),
    )
    assert outcome.code == 2 and "trace.png: No space left" in outcome.err
    assert (tmp_path / "out").read_text().strip()
    assert outcome.out == ""
