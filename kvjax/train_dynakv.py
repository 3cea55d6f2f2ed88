"""Train DynaKV's bases and gates for a model: ``python -m kvjax.train_dynakv --help``."""

import sys
from collections.abc import Sequence

from kvjax.command.entry import run_command
from kvjax.command.train_dynakv_options import TrainDynaKVConfig, train_dynakv_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_command(TrainDynaKVConfig, train_dynakv_parser, argv, _start)


def _start(config, actions, interrupts) -> int:
    from kvjax.command.train_dynakv_run import run

    return run(config, interrupts, getattr(actions, "config", None))


if __name__ == "__main__":
    sys.exit(main())
