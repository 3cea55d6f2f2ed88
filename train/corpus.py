"""Rows to train on, made once for several trainings: a file for their ``--data``.

    python -m kvjax.train.corpus --data documents.jsonl --out text.npy
    python -m kvjax.train.corpus --data text.npy --self-data 8192 --out corpus.npy

Rows cut from texts, as `kvjax.train_dynakv` cuts them, and rows that the model writes itself are
shuffled together and written as token ids [N, --seq-len]. Only whole rows count. On Ctrl-C, or
when sampling fails, the batches of rows that the model has finished are kept.
"""

import argparse
import dataclasses
import io
import pathlib
import sys
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

import kvjax
from kvjax.command.compile_cache import keep_compiled_programs
from kvjax.command.decode_options import DecodeConfig
from kvjax.command.devices import start_devices
from kvjax.command.entry import run_parsed
from kvjax.command.interrupt import INTERRUPTED, Interrupts
from kvjax.command.outline import shape_of_model
from kvjax.command.train_dynakv_options import in_flags
from kvjax.errors import UsageError
from kvjax.files import write_atomically
from kvjax.loading import LanguageModel
from kvjax.report.progress import ProgressLine
from kvjax.report.say import say
from kvjax.train.dynakv.data import read_rows
from kvjax.train.dynakv.sample import sample_rows
from kvjax.train.dynakv.settings import TrainSettings
from kvjax.train.outputs import prepare


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvjax.train.corpus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="directory, GGUF file or hub id (default: the demo model)")
    parser.add_argument("--tokenizer", help="directory or hub id of another tokenizer")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--data", nargs="+", default=[], help="UTF-8 text, .jsonl, or .npy")
    parser.add_argument("--text-field", default="text", help="of a line of a .jsonl file")
    parser.add_argument(
        "--self-data", type=int, default=0, metavar="N", help="rows to sample from the model"
    )
    parser.add_argument("--batch-size", type=int, default=1024, help="of them sampled together")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--seed", type=int, default=0, help="of what is sampled, and of the order")
    parser.add_argument("--out", type=pathlib.Path, required=True, help=".npy file")
    parser.add_argument("--quiet", action="store_true", help="say only what went wrong")
    parser.add_argument("--verbose", action="store_true", help="show where an error came from")
    return parser.parse_args(argv)


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Write the rows and return the exit code.

    Raises:
        KvjaxError: something cannot be used, or there is no row.
    """
    if not args.data and not args.self_data:
        raise UsageError("no data: give --data or --self-data")
    if args.self_data < 0:
        raise UsageError(f"--self-data must be at least 0, got {args.self_data}")
    if args.out.suffix != ".npy":
        raise UsageError(f"--out: {args.out} must end in .npy, or it cannot be read as token ids")
    inputs = (*args.data, args.model, args.tokenizer)
    prepare(args.out, tuple(name for name in inputs if name))
    start_devices(args)
    keep_compiled_programs()
    with in_flags():
        settings = TrainSettings(seq_len=args.seq_len, batch_size=args.batch_size, seed=args.seed)
    config = DecodeConfig(model=args.model, tokenizer=args.tokenizer, dtype=args.dtype)
    shape = shape_of_model(config)
    parts = []
    if args.data:
        with in_flags():
            rows = read_rows(args.data, shape, settings, text_field=args.text_field, whole=True)
        parts.append(rows.tokens[rows.valid.all(1)])
        say_unless(args.quiet, f"{len(parts[0]):,} rows of {', '.join(args.data)}")
    if args.self_data:
        found: list[np.ndarray] = []
        try:
            for tokens in _sampled(args, shape, settings, interrupts):
                found.append(tokens)
        except Exception:
            if found:
                _keep(args, [*parts, *found], shape.config.vocab_size)
            raise
        parts += found
    _keep(args, parts, shape.config.vocab_size)
    return INTERRUPTED if interrupts.requested() else 0


def _keep(args: argparse.Namespace, parts: list[np.ndarray], vocab_size: int) -> None:
    """Shuffle and write all rows."""
    tokens = np.concatenate([*parts, np.zeros((0, args.seq_len), np.int32)])
    if not len(tokens):
        raise UsageError(
            f"there is no whole row of {args.seq_len} tokens: pass a smaller --seq-len"
        )
    np.random.default_rng(args.seed).shuffle(tokens)
    _write(args.out, tokens, vocab_size)
    say_unless(args.quiet, f"{len(tokens):,} rows of {args.seq_len:,} tokens in {args.out}")


def _sampled(
    args: argparse.Namespace, shape: LanguageModel, settings: TrainSettings, interrupts: Interrupts
) -> Iterator[Int[np.ndarray, "B T"]]:
    """Rows that the model writes, a batch at a time, until it is interrupted."""
    progress = ProgressLine(sys.stderr, enabled=not args.quiet)
    try:
        progress.phase(f"loading {shape.source}")
        lm = kvjax.load(shape.source, dtype=args.dtype, tokenizer=args.tokenizer)
        interrupts.wait_for_answers()
        progress.phase("sampling rows from the model (compiles at first)")
        for start in range(0, args.self_data, args.batch_size):
            rows = sample_rows(
                lm,
                min(args.batch_size, args.self_data - start),
                dataclasses.replace(settings, seed=settings.seed + start),
                progress=lambda done, start=start: progress.update(
                    f"sampling · token {start * args.seq_len + done:,}/"
                    f"{args.self_data * args.seq_len:,}"
                ),
                should_stop=interrupts.requested,
            )
            if rows is None:
                break
            yield rows.tokens
    finally:
        progress.clear()


def _write(path: pathlib.Path, tokens: Int[np.ndarray, "N T"], vocab_size: int) -> None:
    content = io.BytesIO()
    np.save(content, tokens.astype(np.uint16 if vocab_size <= 1 << 16 else np.int32))
    try:
        write_atomically(path, content.getvalue())
    except OSError as error:
        raise UsageError(f"--out: cannot write {path}: {error.strerror}") from error


def say_unless(quiet: bool, text: str) -> None:
    if not quiet:
        say(f"kvjax: {text}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_parsed(parse, argv, run)


if __name__ == "__main__":
    sys.exit(main())
