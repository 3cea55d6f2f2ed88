"""Decode answers to prompts: ``python -m kvjax.decode --help``."""

import sys
from collections.abc import Sequence

from kvjax.command.decode_options import DecodeConfig, decode_parser
from kvjax.command.entry import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_command(DecodeConfig, decode_parser, argv, _start)


def _start(config, actions, interrupts) -> int:
    from kvjax.command.explain import explain
    from kvjax.command.plan import show_plan
    from kvjax.command.run import run

    if "plan" in actions:
        return show_plan(config)
    if config.explain is not None:
        return explain(config)
    return run(config, interrupts, getattr(actions, "config", None))


if __name__ == "__main__":
    sys.exit(main())
