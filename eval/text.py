"""Real text for the benchmarks of quality."""

import argparse
import pathlib
from typing import Any

import numpy as np

import kvjax
from kvjax.eval.record import run_record
from kvjax.fetch_model import default_model_path

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
    parser.add_argument("--text", type=pathlib.Path, required=True, help="a file of plain text")
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
        "text": args.text.name,
        "rows": args.rows,
        "tokens": args.tokens,
        "prompt_tokens": args.prompt_tokens,
        "scored": args.rows * (args.tokens - args.prompt_tokens),
    }


def rows_of_text(lm: kvjax.LanguageModel, path: pathlib.Path, rows: int, tokens: int) -> np.ndarray:
    """The file's first ``rows * tokens`` tokens, one row after the other."""
    text = path.read_text(encoding="utf-8")[: rows * tokens * CHARACTERS]
    ids = lm.tokenizer.encode(text)
    if len(ids) < rows * tokens:
        raise SystemExit(f"{path} has {len(ids):,} tokens, and {rows * tokens:,} are needed")
    return np.array(ids[: rows * tokens], np.int32).reshape(rows, tokens)
