"""Rows made once for several trainings, and the text that they are cut from."""

import io
import json

import numpy as np
import pytest

from kvjax.errors import NumericalError
from kvjax.train import corpus, documents


@pytest.fixture
def made(model, tmp_path, monkeypatch):
    """Run the command on the small model: its exit code, and its rows if there are any."""
    monkeypatch.setattr(corpus, "keep_compiled_programs", lambda: None)

    def run(*argv: object):
        out = tmp_path / "rows.npy"
        out.unlink(missing_ok=True)
        shared = ("--model", model, "--seq-len", 16, "--batch-size", 2, "--dtype", "float32")
        code = corpus.main([*map(str, (*shared, "--out", out, *argv))])
        return code, np.load(out) if out.exists() else None

    return run


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(33 + place % 90) for place in range(100)))
    return path


def test_sampled_rows_and_those_of_texts_are_shuffled_together(made, text):
    code, rows = made("--data", text, "--self-data", 4)
    assert code == 0 and rows.shape == (10, 16) and rows.dtype == np.uint16
    ids = [1 + place % 90 for place in range(96)]
    cut = {tuple(ids[start : start + 16]) for start in range(0, 96, 16)}
    places = [place for place, row in enumerate(rows.tolist()) if tuple(row) in cut]
    assert len(places) == 6 and places not in (list(range(6)), list(range(4, 10)))
    sampled = {tuple(row) for row in rows.tolist()} - cut
    assert len(sampled) == 4  # the second batch is not the first one again
    again = made("--data", text, "--self-data", 4)[1]
    np.testing.assert_array_equal(again, rows)
    assert (made("--data", text, "--self-data", 4, "--seed", 1)[1] != rows).any()


def test_rows_can_be_read_again(made, text, tmp_path):
    rows = made("--data", text)[1]
    np.save(tmp_path / "before.npy", rows)
    again = made("--data", tmp_path / "before.npy", "--seed", 5)[1]
    assert sorted(again.tolist()) == sorted(rows.tolist())


def test_what_the_model_has_finished_is_kept(made, text, monkeypatch):
    real, done = corpus.sample_rows, []

    def stopped(*args, **options):
        if done:
            return None
        done.append(real(*args, **options))
        return done[0]

    monkeypatch.setattr(corpus, "sample_rows", stopped)
    _, rows = made("--self-data", 6)
    assert sorted(rows.tolist()) == sorted(done[0].tokens.tolist()) and len(rows) == 2


def test_what_the_model_has_finished_is_kept_when_it_fails(made, monkeypatch, capsys):
    real, done = corpus.sample_rows, []

    def failing(*args, **options):
        if done:
            raise NumericalError("self-sampled row 1: a logit is NaN")
        done.append(real(*args, **options))
        return done[0]

    monkeypatch.setattr(corpus, "sample_rows", failing)
    code, rows = made("--self-data", 6)
    assert code == 5 and sorted(rows.tolist()) == sorted(done[0].tokens.tolist())
    said = capsys.readouterr().err.splitlines()
    assert said[-2].startswith("kvjax: 2 rows of 16 tokens in ")
    assert said[-1] == "kvjax: self-sampled row 1: a logit is NaN"
    code, rows = made("--self-data", 6)
    assert code == 5 and rows is None  # there is nothing to keep


def test_out_is_looked_at_before_anything_is_sampled(made, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(corpus, "_sampled", None)
    assert made("--self-data", 2, "--out", text / "rows.npy")[0] == 2
    assert "--out: cannot write " in capsys.readouterr().err
    before = np.arange(64, dtype=np.int32).reshape(4, 16)
    np.save(tmp_path / "in.npy", before)
    (tmp_path / "link.npy").symlink_to(tmp_path / "in.npy")
    for name in ("in.npy", "link.npy"):
        assert made("--data", tmp_path / "in.npy", "--out", tmp_path / name)[0] == 2
        assert "is also an input" in capsys.readouterr().err
    np.testing.assert_array_equal(np.load(tmp_path / "in.npy"), before)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "give --data or --self-data"),
        (("--self-data", -1), "--self-data must be at least 0, got -1"),
        (("--self-data", 2, "--batch-size", 0), "--batch-size must be a whole number"),
        (("--self-data", 2, "--seq-len", 1), "--seq-len must be a whole number, at least 2"),
        (("--data", "nowhere.txt"), "cannot read nowhere.txt"),
    ],
)
def test_what_cannot_be_is_refused(made, argv, message, capsys):
    code, rows = made(*argv)
    assert code == 2 and rows is None and message in capsys.readouterr().err


def test_a_text_that_makes_no_row_is_refused(made, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("short")
    assert made("--data", tmp_path / "short.txt") == (2, None)
    assert "no whole row of 16 tokens" in capsys.readouterr().err


def test_documents_are_docstrings_and_pages_of_packages(tmp_path):
    package = tmp_path / "packages" / "one"
    (package / "tests").mkdir(parents=True)
    long = "What it says is long enough."
    (package / "a.py").write_text(f'"""{long}"""\ndef f():\n    """Short."""\n    "no docstring"\n')
    (package / "b.py").write_text(
        f'class A:\n    """{long}"""\n    def g(self):\n        """{long * 2}"""'
    )
    (package / "c.md").write_text(f"# Title\n{long}\n")
    (package / "broken.py").write_text("def :")
    (package / "d.py").write_bytes(b"\xff")
    (package / "data.txt").write_text(long * 3)
    (package / "tests" / "e.py").write_text(f'"""{long * 4}"""')
    found = list(documents.documents(tmp_path / "packages", 20))
    assert found == [long, long * 2, f"# Title\n{long}"]  # what a.py has said, b.py does not repeat
    out = tmp_path / "documents.jsonl"
    shared = ["--folder", str(tmp_path / "packages"), "--shortest", "20", "--out", str(out)]
    assert documents.main([*shared, "--characters", "60"]) == 0
    texts = [json.loads(line)["text"] for line in io.StringIO(out.read_text())]
    assert sum(map(len, texts)) == 60 and all(any(text in one for one in found) for text in texts)
    before = out.read_bytes()
    assert documents.main([*shared, "--characters", "60"]) == 0
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--folder": "{tmp}/none"}, "--folder: {tmp}/none is no folder"),
        ({"--folder": "{tmp}/empty"}, "--folder: {tmp}/empty holds no passage of 9 characters"),
        ({"--out": "{tmp}/none/out"}, "--out: cannot write {tmp}/none/out: No such file"),
        ({"--out": "{tmp}"}, "--out: {tmp} is no regular file"),
        ({"--characters": "0"}, "--characters must be at least 1, got 0"),
    ],
)
def test_documents_that_cannot_be_found_or_written(tmp_path, capsys, change, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "page.md").write_text("What it says.")
    out = tmp_path / "out"
    options = {"--folder": "{tmp}", "--out": str(out), "--characters": "60", "--shortest": "9"}
    argv = [word.format(tmp=tmp_path) for pair in (options | change).items() for word in pair]
    assert documents.main(argv) == 2 and not out.exists()
    told = capsys.readouterr().err
    assert message.format(tmp=tmp_path) in told and told.count("\n") == 1


def test_documents_on_a_full_disk(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    (tmp_path / "page.md").write_text("What it says.")
    monkeypatch.setattr(documents, "write_atomically", full)
    argv = ("--folder", tmp_path, "--out", tmp_path / "out", "--characters", 60, "--shortest", 9)
    assert documents.main([*map(str, argv)]) == 2
    assert f"--out: cannot write {tmp_path}/out: No space left" in capsys.readouterr().err
