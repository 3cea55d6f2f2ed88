"""Train the reasoner: ``python -m kvjax.train.reasoner --steps N``."""

import argparse
import math
import os
import pathlib
import shlex
import signal
import sys
import tempfile

from flax import nnx

from kvjax.command.train_dynakv_options import in_flags
from kvjax.errors import KvjaxError, UsageError
from kvjax.train.outputs import prepare
from kvjax.train.reasoner.export import WEIGHTS, export
from kvjax.train.reasoner.loop import Settings, train
from kvjax.train.reasoner.task import WIDTHS

OUT = pathlib.Path("eval/models/reasoner")


def parse(argv: list[str] | None) -> argparse.Namespace:
    default = Settings(steps=1)
    parser = argparse.ArgumentParser(
        prog="python -m kvjax.train.reasoner", description=__doc__.splitlines()[0]
    )
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int, help="of the whole training")
    length.add_argument(
        "--seconds", type=float, help="as many steps as take about so long on this device"
    )
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--batch-tokens", type=int, default=default.batch_tokens)
    parser.add_argument("--learning-rate", type=float, default=default.learning_rate)
    parser.add_argument("--warmup", type=int, default=default.warmup, help="steps")
    parser.add_argument(
        "--levels", type=int, nargs="+", choices=WIDTHS, default=list(default.levels)
    )
    parser.add_argument("--out", type=pathlib.Path, default=OUT, help="for the model")
    parser.add_argument(
        "--checkpoints", type=pathlib.Path, help="a directory; the same command goes on from there"
    )
    parser.add_argument("--every", type=int, default=500, help="steps between two checkpoints")
    workers = max(min((os.cpu_count() or 1) - 2, 12), 0)
    parser.add_argument("--workers", type=int, default=workers, help="processes for the problems")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Train and export; the first Ctrl-C or SIGTERM ends the training early."""
    args = parse(argv)
    asked = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: asked.append(number))
    try:
        settings = settings_of(args)
        prepare(args.out / WEIGHTS)
        with in_flags(Settings):
            settings, state = train(
                settings,
                checkpoints=args.checkpoints,
                workers=args.workers,
                every=args.every,
                seconds=args.seconds,
                say=lambda line: print(line, file=sys.stderr, flush=True),
                should_stop=lambda step: bool(asked),
            )
        _export(args.out, settings, state["params"])
    except KvjaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    done = int(state["step"])
    print(f"{args.out}: the model after {done} of {settings.steps} steps", file=sys.stderr)
    return 0 if done == settings.steps else 130


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings that flags give; with ``--seconds``, the steps are still to be chosen.

    Raises:
        UsageError: a value that cannot be.
    """
    for name, low in {"every": 1, "workers": 0}.items():
        if (value := getattr(args, name)) < low:
            raise UsageError(f"--{name} must be at least {low}, got {value}")
    if args.seconds is not None and not 0 < args.seconds < math.inf:
        raise UsageError(f"--seconds must be above 0 and finite, got {args.seconds}")
    with in_flags(Settings):
        return Settings(
            steps=1 if args.steps is None else args.steps,
            batch_tokens=args.batch_tokens,
            seed=args.seed,
            learning_rate=args.learning_rate,
            warmup=args.warmup,
            levels=tuple(sorted(set(args.levels))),
        )


def _export(out: pathlib.Path, settings: Settings, params: nnx.State) -> None:
    """Write the model, elsewhere if it has to be: hours of training are not lost to a full disk.

    Raises:
        UsageError: it is not where it was wanted.
    """
    try:
        export(out, settings.config, params, _command(settings))
    except OSError as error:
        failed = f"--out: cannot write {out}: {error.strerror or error}"
        try:
            spare = pathlib.Path(tempfile.mkdtemp(prefix="reasoner-"))
            export(spare, settings.config, params, _command(settings))
        except OSError:
            raise UsageError(failed) from error
        raise UsageError(f"{failed}; the model is in {spare}") from error


def _command(settings: Settings) -> str:
    """What trains the same model again."""
    given = {"--steps": settings.steps}
    default = Settings(steps=1)
    for name in ("seed", "batch_tokens", "learning_rate", "warmup"):
        if getattr(settings, name) != getattr(default, name):
            given[f"--{name.replace('_', '-')}"] = getattr(settings, name)
    words = [str(word) for pair in given.items() for word in pair]
    if settings.levels != default.levels:
        words += ["--levels", *map(str, settings.levels)]
    return shlex.join(["python", "-m", "kvjax.train.reasoner", *words])


if __name__ == "__main__":
    sys.exit(main())
