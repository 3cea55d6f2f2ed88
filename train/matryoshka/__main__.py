"""Train MatryoshkaKV's projections for a model and find ranks for some rates, as a baseline.

python -m kvjax.train.matryoshka --model M --data text.jsonl --target-rate 0.5 0.3 --out DIR
"""

import argparse
import dataclasses
import os
import pathlib
import sys

import jax

import kvjax
from kvjax.command.compile_cache import keep_compiled_programs
from kvjax.command.decode_options import DecodeConfig
from kvjax.command.devices import start_devices
from kvjax.command.entry import run_parsed
from kvjax.command.interrupt import INTERRUPTED, Interrupts
from kvjax.command.outline import shape_of_model
from kvjax.command.train_dynakv_options import in_flags
from kvjax.errors import UsageError
from kvjax.report.progress import ProgressLine
from kvjax.report.say import say
from kvjax.train.dynakv.data import read_rows, split
from kvjax.train.matryoshka.loop import check, train
from kvjax.train.matryoshka.settings import MatryoshkaSettings

_OWN = MatryoshkaSettings(target_rates=(1.0,))
_TRAINING = {
    "steps": "updates; 0 keeps principal components",
    "seq_len": "tokens of a row",
    "batch_size": "rows read together, spread over all devices",
    "grad_accum": "such batches for each update",
    "lr_u": "peak learning rate of projections and means",
    "warmup": "updates over which it rises, before a cosine to 0",
    "clip": "largest norm of a gradient",
    "save_every": "updates between checkpoints, each with an evaluation",
    "eval_rows": "rows held out for evaluations",
    "calibration_tokens": "tokens that principal components are fitted to",
    "seed": "of the order of rows, and of ranks while training",
}
_SEARCH = {
    "kl_weight": "of the divergence from the model as it is, in the loss",
    "ce_weight": "of the cross-entropy",
    "drops": "ranks lowered in one sweep of the greedy search; 1 is the paper's",
    "search_rows": "rows of training data that the search reads",
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvjax.train.matryoshka",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="directory, GGUF file or hub id (default: the demo model)")
    parser.add_argument("--tokenizer", help="directory or hub id of another tokenizer")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--data", nargs="+", required=True, help="UTF-8 text, .jsonl, or .npy")
    parser.add_argument("--text-field", default="text", help="of a line of a .jsonl file")
    parser.add_argument(
        "--target-rate",
        type=float,
        nargs="+",
        required=True,
        metavar="R",
        help="shares of components to keep",
    )
    parser.add_argument("--out", required=True, help="folder for all that is written")
    parser.add_argument("--resume", action="store_true", help="go on from what --out holds")
    parser.add_argument(
        "--ranks",
        choices=("greedy", "uniform"),
        default=_OWN.ranks,
        help="shared out among heads, or the same for all",
    )
    for helps, default in ((_TRAINING, _OWN.training), (_SEARCH, _OWN)):
        for name, text in helps.items():
            value = getattr(default, name)
            flag = "--" + name.replace("_", "-")
            shown = f"{text} (default: {value})"
            parser.add_argument(flag, type=type(value), default=value, metavar="N", help=shown)
    parser.add_argument("--quiet", action="store_true", help="say only what went wrong")
    parser.add_argument("--verbose", action="store_true", help="show where an error came from")
    return parser.parse_args(argv)


def settings_of(args: argparse.Namespace) -> MatryoshkaSettings:
    """The settings that flags give.

    Raises:
        UsageError: a value that cannot be.
    """
    training = {name: getattr(args, name) for name in _TRAINING}
    own = {name: getattr(args, name) for name in _SEARCH}
    return MatryoshkaSettings(
        target_rates=tuple(args.target_rate),
        training=dataclasses.replace(_OWN.training, **training),
        ranks=args.ranks,
        **own,
    )


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Train and return the exit code.

    Raises:
        KvjaxError: nothing more can be done; checkpoints stay.
    """
    if os.path.exists(args.out) and not os.path.isdir(args.out):
        raise UsageError(f"--out: {args.out} is no folder; name another one")
    start_devices(args)
    keep_compiled_programs()
    with in_flags(), in_flags(MatryoshkaSettings):
        settings = settings_of(args)
        shape = shape_of_model(
            DecodeConfig(model=args.model, tokenizer=args.tokenizer, dtype=args.dtype)
        )
        check(shape, settings, jax.device_count())
        try:
            rows = read_rows(args.data, shape, settings.training, text_field=args.text_field)
            split(rows, settings.training)
        except UsageError as error:
            raise UsageError(f"--data: {error}") from error
        progress = ProgressLine(sys.stderr, enabled=not args.quiet)
        try:
            progress.phase(f"loading {shape.source}")
            lm = kvjax.load(shape.source, dtype=args.dtype, tokenizer=args.tokenizer)
            interrupts.wait_for_answers()
            found = train(
                lm,
                rows,
                settings,
                args.out,
                progress,
                name=pathlib.Path(shape.source).name,
                resume=args.resume,
                should_stop=interrupts.requested,
            )
        finally:
            progress.clear()
    if found is None:
        say(f"kvjax: interrupted; the same command goes on from {args.out} with --resume")
        return INTERRUPTED
    for point in found.points:
        values = point.measured
        say(
            f"kvjax: target rate {point.target_rate}: held-out cross-entropy {values['ce']:.4f}, "
            f"divergence {values['kl']:.4f} at a rate of {values['rate']:.3f}"
        )
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_parsed(parse, argv, run)


if __name__ == "__main__":
    sys.exit(main())
