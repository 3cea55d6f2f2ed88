"""Find a model's kinds of thought, for ThinKV: ``python -m kvjax.calibrate --help``."""

import sys
from collections.abc import Sequence

from kvjax.command.calibrate_options import CalibrateConfig, calibrate_parser
from kvjax.command.entry import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_command(CalibrateConfig, calibrate_parser, argv, _start)


def _start(config, actions, interrupts) -> int:
    from kvjax.command.calibrate_run import run

    return run(config, interrupts, getattr(actions, "config", None))


if __name__ == "__main__":
    sys.exit(main())
