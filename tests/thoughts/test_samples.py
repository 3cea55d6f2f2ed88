"""Samples of an unfinished run are taken by the same run only."""

import json

import numpy as np
import pytest

from kvjax.errors import UsageError
from kvjax.thoughts.samples import Samples

RUN = {"fingerprint": "ab", "max_new_tokens": 64, "top_p": None}


def sample(seed: int, tokens: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).random((3, tokens), np.float32)


@pytest.fixture
def store(tmp_path):
    return Samples(tmp_path / "out.json.samples", RUN, 3)


def test_what_was_added_is_read(store):
    assert store.read() == {}
    store.add(10, sample(1))
    store.add(2, sample(2, 9))
    found = Samples(store.folder, dict(RUN), 3).read()
    assert list(found) == [2, 10]
    np.testing.assert_array_equal(found[10], sample(1))
    np.testing.assert_array_equal(found[2], sample(2, 9))


@pytest.mark.parametrize("key", RUN)
def test_samples_of_another_run_are_refused_and_stay(store, key):
    store.add(0, sample(1))
    other = Samples(store.folder, RUN | {key: "other"}, 3)
    with pytest.raises(UsageError, match=f"another run: {key} was .* and is 'other'; delete it"):
        other.read()
    assert list(store.read()) == [0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY\x01\x00",
        sample(1)[:2],
        sample(1).astype(np.float64),
        sample(1) + 1,
        np.full_like(sample(1), np.nan),
        sample(1)[:, :0],
        np.array([[{}]], object),
    ],
    ids=str,
)
def test_damaged_samples_are_refused(store, content):
    store.add(0, sample(1))
    file = store.folder / "0.npy"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        np.save(file, content)
    with pytest.raises(UsageError, match=r"cannot be read .*; delete it to start anew"):
        store.read()


@pytest.mark.parametrize("content", ["", "[]", "null", "{}", "[" * 100_000])
def test_samples_of_nobody_are_refused(store, content):
    store.add(0, sample(1))
    (store.folder / "run.json").write_text(content)
    with pytest.raises(UsageError, match="delete it to start anew"):
        store.read()


def test_a_run_that_was_killed_while_it_wrote_goes_on(store):
    store.folder.mkdir()
    (store.folder / ".run.json.123.tmp").write_text("{")
    assert store.read() == {}
    store.add(0, sample(1))
    (store.folder / ".1.npy.123.tmp").write_bytes(b"\x93NUM")
    assert list(store.read()) == [0]


def test_removing_takes_its_own_files_only(store):
    store.add(0, sample(1))
    (store.folder / ".1.npy.123.tmp").write_bytes(b"")
    (store.folder / "notes.txt").write_text("mine")
    store.remove()
    assert [path.name for path in store.folder.iterdir()] == ["notes.txt"]
    (store.folder / "notes.txt").unlink()
    store.add(0, sample(1))
    store.remove()
    assert not store.folder.exists()
    store.remove()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*samples: "):
        Samples(tmp_path / "file" / "samples", RUN, 3).add(0, sample(1))


def test_the_run_is_written_as_json(store):
    store.add(0, sample(1))
    assert json.loads((store.folder / "run.json").read_text()) == RUN
