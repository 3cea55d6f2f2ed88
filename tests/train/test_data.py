"""Texts and tokens become rows, and rows the batches of every step."""

import dataclasses
import json

import numpy as np
import pytest

from kvjax.errors import UsageError
from kvjax.train.dynakv.data import Rows, batch_of, in_batches, read_rows, split
from kvjax.train.dynakv.settings import TrainSettings
from tests.dynakv.tiny import tiny

SETTINGS = TrainSettings(steps=100, seq_len=8, batch_size=2, grad_accum=3, eval_rows=2)


class Letters:
    """Numbers letters; every text begins with 60 and ends with 61."""

    bos_id, eos_id = 60, 61

    def encode(self, text: str) -> list[int]:
        return [60, *(ord(letter) - 97 for letter in text)]


@pytest.fixture
def lm():
    return dataclasses.replace(tiny(), tokenizer=Letters())


def stream(rows: Rows) -> list[int]:
    return rows.tokens[rows.valid].tolist()


def test_documents_follow_one_another(lm, tmp_path):
    (tmp_path / "a.txt").write_text("abcdef", encoding="utf-8")
    lines = [{"text": "gh"}, {"text": "ijk", "other": 1}]
    (tmp_path / "b.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    rows = read_rows([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], lm, SETTINGS)
    assert rows.tokens.shape == (2, 8) and rows.tokens.dtype == np.int32
    expected = [60, 0, 1, 2, 3, 4, 5, 61, 60, 6, 7, 61, 60, 8, 9, 10, 61]
    assert stream(rows) == expected[:16]  # a last token alone predicts nothing


def test_a_last_row_is_padded(lm, tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(19, dtype=np.uint16))
    rows = read_rows([str(tmp_path / "ids.npy")], lm, SETTINGS)
    assert stream(rows) == list(range(19))
    assert rows.valid.sum(1).tolist() == [8, 8, 3]


def test_rows_of_a_file_stay_rows(lm, tmp_path):
    np.save(tmp_path / "rows.npy", np.asarray([[1, 2, 3, -1], [4, -1, -1, -1], [5, 6, 7, 8]]))
    rows = read_rows([str(tmp_path / "rows.npy")], lm, SETTINGS)
    assert rows.valid.sum(1).tolist() == [3, 1, 4]
    assert rows.tokens.shape == (3, 8) and stream(rows) == list(range(1, 9))


def test_reading_stops_when_there_is_enough(lm, tmp_path):
    np.save(tmp_path / "ids.npy", np.ones(1 << 16, np.int32))
    few = TrainSettings(
        steps=2, seq_len=8, batch_size=2, grad_accum=3, eval_rows=2, calibration_tokens=8
    )
    paths = [str(tmp_path / "ids.npy"), str(tmp_path / "never.txt")]
    assert len(read_rows(paths[:1], lm, few)) == 2 * 6 + 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff", "not UTF-8"),
        ("a.jsonl", b'{"text": 3}', "line 1 has no text in 'text'"),
        ("a.jsonl", b'{"text": "a"}\n[', "line 2 is not JSON"),
        ("a.jsonl", b"[]", "line 1 has no text"),
        ("a.npy", b"", "cannot read"),
        ("a.npy", b"not an array", "cannot read"),
        ("a.npy", np.zeros((2, 2, 2), np.int32), r"whole numbers \[N\] or \[N, T\], got int32"),
        ("a.npy", np.zeros(4), "got float64"),
        ("a.npy", np.asarray([1, 64]), "64 is outside the vocabulary of 64"),
        ("a.npy", np.asarray([1, -1]), "-1 is outside"),
        ("a.npy", np.asarray([[1, -1, 2]]), "padded behind"),
        ("a.npy", np.ones((1, 9), np.int32), "rows of 9 tokens, and seq_len is 8"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(lm, tmp_path, name, content, message):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(UsageError, match=message):
        read_rows([str(path)], lm, SETTINGS)


def test_what_is_not_there_or_has_no_tokenizer_is_refused(lm, tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*none\.txt: No such file"):
        read_rows([str(tmp_path / "none.txt")], lm, SETTINGS)
    with pytest.raises(UsageError, match="no tokenizer: name one, or give token ids"):
        read_rows([str(tmp_path / "none.txt")], tiny(), SETTINGS)


def numbered(count: int) -> Rows:
    tokens = np.repeat(np.arange(count, dtype=np.int32)[:, None], 4, 1)
    return Rows(tokens, np.ones(tokens.shape, bool))


def test_the_last_rows_are_held_out():
    training, held = split(numbered(7), SETTINGS)
    assert training.tokens[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert held.tokens[:, 0].tolist() == [5, 6]
    with pytest.raises(UsageError, match="makes 1 rows of seq_len 8, and 2 are needed"):
        split(numbered(1), SETTINGS)


def test_every_row_is_read_once_before_any_is_read_again():
    rows = numbered(9)
    batches = [batch_of(rows, step, SETTINGS) for step in range(3)]
    assert batches[0].tokens.shape == (3, 2, 4)
    seen = np.concatenate([batch.tokens[..., 0].ravel() for batch in batches])
    assert sorted(seen[:9]) == sorted(seen[9:]) == list(range(9))
    assert seen[:9].tolist() != seen[9:].tolist()
    again = batch_of(rows, 1, SETTINGS)  # nothing is remembered from step to step
    np.testing.assert_array_equal(again.tokens, batches[1].tokens)


def test_a_last_batch_is_filled_with_padding():
    parts = list(in_batches(numbered(5), 3))
    assert [len(part) for part in parts] == [3, 3]
    assert parts[1].valid.all(1).tolist() == [True, True, False]


def test_a_digest_tells_rows_apart_but_not_what_padding_holds():
    rows = numbered(3)
    valid = rows.valid.copy()
    valid[0, 3:] = False
    padded = Rows(rows.tokens, valid)
    other = rows.tokens.copy()
    other[0, 3] = 9
    assert padded.digest() == Rows(other, valid).digest() != rows.digest()
