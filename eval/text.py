"""Real text for the benchmarks of quality."""

import argparse
import functools
import itertools
import pathlib
from typing import Any

import numpy as np

import kvjax
from kvjax.eval.record import run_record
from kvjax.fetch_model import default_model_path
from kvjax.train.reasoner.task import WIDTHS, problem

REASONER = pathlib.Path(__file__).parent / "models" / "reasoner"
NUMBERS = 200
"""Problems of a level that are looked through for long ones."""
CHARACTERS = 12
"""Of a file, for every token that is wanted; English text has four or five a token."""


def small_model() -> kvjax.LanguageModel:
    """SmolLM2 in float32."""
    path = default_model_path()
    if path is None:
        raise SystemExit("needs SmolLM2: python -m kvjax.fetch_model smollm2")
    return kvjax.load(path, dtype="float32")


def add_text_arguments(
    parser: argparse.ArgumentParser, rows: int, tokens: int, prompt: int
) -> None:
    """What to read, and which variants of a long list to run here."""
    read = parser.add_mutually_exclusive_group(required=True)
    read.add_argument("--text", type=pathlib.Path, help="a file of plain text, which SmolLM2 reads")
    read.add_argument(
        "--reasoner",
        type=int,
        choices=WIDTHS,
        metavar="LEVEL",
        help="problems of this level with their traces, which the reasoner reads",
    )
    parser.add_argument("--rows", type=int, default=rows)
    parser.add_argument("--tokens", type=int, default=tokens, help="of a row, its prompt included")
    parser.add_argument("--prompt-tokens", type=int, default=prompt)


def add_slice_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--start", type=int, default=0, help="of the variants, the first to run")
    parser.add_argument("--step", type=int, default=1, help="run each of so many")


def record_of_text(args: argparse.Namespace, lm: kvjax.LanguageModel) -> dict[str, Any]:
    """What a benchmark of quality writes beside its figures, from its own arguments."""
    return {
        "run": run_record(args.commit),
        "model": pathlib.Path(lm.source).name,
        "dtype": "float32",
        "text": args.text.name if args.text else f"reasoner, level {args.reasoner}",
        "rows": args.rows,
        "tokens": args.tokens,
        "prompt_tokens": args.prompt_tokens,
        "scored": args.rows * (args.tokens - args.prompt_tokens),
    }


def model_of(args: argparse.Namespace) -> kvjax.LanguageModel:
    """Who reads what ``add_text_arguments`` asks for, in float32."""
    return small_model() if args.text else kvjax.load(REASONER, dtype="float32")


def rows_of(args: argparse.Namespace, lm: kvjax.LanguageModel) -> np.ndarray:
    """What ``add_text_arguments`` asks for: rows of tokens."""
    if args.text:
        return rows_of_text(lm, args.text, args.rows, args.tokens)
    found = map(functools.partial(problem, args.reasoner, split="validation"), range(NUMBERS))
    long = (one.tokens[: args.tokens] for one in found if len(one.tokens) >= args.tokens)
    rows = list(itertools.islice(long, args.rows))
    if len(rows) < args.rows:
        raise SystemExit(
            f"--tokens {args.tokens}: {len(rows)} of {NUMBERS} problems of level {args.reasoner} "
            f"have as many: pass fewer"
        )
    return np.array(rows, np.int32)


def rows_of_text(lm: kvjax.LanguageModel, path: pathlib.Path, rows: int, tokens: int) -> np.ndarray:
    """The file's first ``rows * tokens`` tokens, one row after the other."""
    text = path.read_text(encoding="utf-8")[: rows * tokens * CHARACTERS]
    ids = lm.tokenizer.encode(text)
    if len(ids) < rows * tokens:
        raise SystemExit(f"{path} has {len(ids):,} tokens, and {rows * tokens:,} are needed")
    return np.array(ids[: rows * tokens], np.int32).reshape(rows, tokens)
