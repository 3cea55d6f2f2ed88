"""From texts, or tokens, to rows of a fixed length, and from rows to the batches of every step."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Int

from kvjax.errors import UsageError
from kvjax.train.dynakv.settings import TrainSettings

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel

_PADDING = -1  # in a file of rows


@dataclasses.dataclass(frozen=True)
class Rows:
    """Right-padded rows.

    Attributes:
        tokens: int32 [N, T].
        valid: bool [N, T], false where a row is padded.
    """

    tokens: Int[np.ndarray, "N T"]
    valid: Bool[np.ndarray, "N T"]

    def __len__(self) -> int:
        return len(self.tokens)

    def digest(self) -> str:
        """Names the rows by their content."""
        content = np.where(self.valid, self.tokens, _PADDING).astype("<i4")
        return hashlib.sha256(str(content.shape).encode() + content.tobytes()).hexdigest()

    def take(self, index: Any) -> "Rows":
        return Rows(self.tokens[index], self.valid[index])


def read_rows(
    paths: Iterable[str],
    lm: "LanguageModel",
    settings: TrainSettings,
    *,
    text_field: str = "text",
    whole: bool = False,
) -> Rows:
    """Rows out of files.

    Documents follow one another, each with the tokens that begin and end a text in this model, and
    are cut into rows. A last row is padded.

    Args:
        paths: UTF-8 texts (one document each), ``.jsonl`` (a document a line, in ``text_field``),
            or ``.npy`` with token ids: one stream, or rows in which -1 is padding.
        lm: the model; its weights may be shapes alone.
        settings: how long rows are, and how many are of use.
        text_field: where a line of JSON has its text.
        whole: read the files to their end; else no more than is enough for every step.

    Raises:
        UsageError: a file cannot be read or used, or there is too little in all of them.
    """
    wanted = settings.steps * settings.rows_a_step + settings.eval_rows
    wanted = max(wanted, settings.eval_rows + -(-settings.calibration_tokens // settings.seq_len))
    rows, pieces, held = [], [], 0
    for path in paths:
        for kind, ids in _documents(path, lm, text_field):
            if kind == "row":
                if len(ids) > settings.seq_len:
                    raise UsageError(
                        f"{path}: has rows of {len(ids)} tokens, and seq_len is {settings.seq_len}"
                    )
                rows.append(ids)
            else:
                pieces.append(ids)
                held += len(ids)
            if not whole and len(rows) + held // settings.seq_len >= wanted:
                break
    stream = np.concatenate([*pieces, np.zeros(0, np.int32)])
    cuts = range(0, len(stream), settings.seq_len)
    rows += [part for cut in cuts if len(part := stream[cut : cut + settings.seq_len]) > 1]
    return _padded(rows if whole else rows[:wanted], settings.seq_len)


def split(rows: Rows, settings: TrainSettings) -> tuple[Rows, Rows]:
    """The rows to train on, and the last ones, which are held out.

    Raises:
        UsageError: nothing is left to train on.
    """
    held = min(settings.eval_rows, len(rows) // 2)
    if held < 1:
        raise UsageError(
            f"the data makes {len(rows)} rows of seq_len {settings.seq_len}, and 2 are needed, one "
            "of them held out: give more, or a smaller seq_len"
        )
    return rows.take(slice(None, -held)), rows.take(slice(-held, None))


def batch_of(rows: Rows, step: int, settings: TrainSettings) -> Rows:
    """The rows [A, B, T] of one step; a function of the step alone.

    Every row is read once before any is read again, each time in another order.
    """
    count = settings.rows_a_step
    places = np.arange(step * count, (step + 1) * count)
    epochs, places = np.divmod(places, len(rows))
    orders = {
        int(epoch): np.random.default_rng([settings.seed, int(epoch)]).permutation(len(rows))
        for epoch in np.unique(epochs)
    }
    chosen = [orders[int(epoch)][place] for epoch, place in zip(epochs, places, strict=True)]
    shape = (settings.grad_accum, settings.batch_size)
    return rows.take(np.asarray(chosen).reshape(shape))


def in_batches(rows: Rows, size: int) -> Iterator[Rows]:
    """All rows, ``size`` at a time; the last batch is filled up with padding."""
    for start in range(0, len(rows), size):
        part = rows.take(slice(start, start + size))
        short = [(0, size - len(part)), (0, 0)]
        yield Rows(np.pad(part.tokens, short), np.pad(part.valid, short))


def _documents(path: str, lm: "LanguageModel", text_field: str) -> Iterator[tuple[str, np.ndarray]]:
    """Pieces of a stream, and rows that stand for themselves."""
    suffix = pathlib.Path(path).suffix
    if suffix == ".npy":
        yield from _token_file(path, lm.config.vocab_size)
        return
    if lm.tokenizer is None:
        raise UsageError(f"{path}: the model has no tokenizer: name one, or give token ids (.npy)")
    end = [] if lm.tokenizer.eos_id is None else [lm.tokenizer.eos_id]
    try:
        with open(path, encoding="utf-8-sig") as file:
            texts = _lines(path, file, text_field) if suffix == ".jsonl" else [file.read()]
            for text in texts:
                yield "stream", np.asarray([*lm.tokenizer.encode(text), *end], np.int32)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: byte {error.start}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {_reason(error)}") from error


def _lines(path: str, lines: Iterable[str], text_field: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: line {number} is not JSON ({error})") from error
        text = record.get(text_field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise UsageError(f"{path}: line {number} has no text in {text_field!r}")
        yield text


def _token_file(path: str, vocab_size: int) -> Iterator[tuple[str, np.ndarray]]:
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"cannot read {path}: {_reason(error)}") from error
    if ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer):
        raise UsageError(
            f"{path} must hold whole numbers [N] or [N, T], got {ids.dtype} {list(ids.shape)}"
        )
    lowest = 0 if ids.ndim == 1 else _PADDING
    for block in ids if ids.ndim == 2 else np.array_split(ids, max(1, len(ids) >> 20)):
        block = np.asarray(block)
        wrong = block[(block < lowest) | (block >= vocab_size)]
        if wrong.size:
            raise UsageError(f"{path}: {wrong[0]} is outside the vocabulary of {vocab_size}")
        block = block.astype(np.int32)
        if ids.ndim == 1:
            yield "stream", block
            continue
        length = int((block != _PADDING).sum())
        if (block[:length] == _PADDING).any():
            raise UsageError(f"{path}: {_PADDING} stands before a token; rows are padded behind")
        yield "row", block[:length]


def _padded(rows: list[np.ndarray], length: int) -> Rows:
    tokens = np.zeros((len(rows), length), np.int32)
    valid = np.zeros((len(rows), length), bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row)], valid[index, : len(row)] = row, True
    return Rows(tokens, valid)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
