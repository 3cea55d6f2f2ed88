"""Decode answers to prompts: ``python -m kvjax.decode --help``."""

import dataclasses
import sys
from collections.abc import Sequence

from kvjax.command.decode_options import DecodeConfig, decode_parser
from kvjax.command.errors import exit_code
from kvjax.command.interrupt import Interrupts
from kvjax.command.options import parse
from kvjax.command.yaml_file import dump_yaml


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    config = None
    try:
        config, actions = parse(DecodeConfig, decode_parser(), argv)
        if "print_config" in actions:
            print(dump_yaml(dataclasses.asdict(config)), end="", flush=True)
            return 0
        with Interrupts() as interrupts:
            # Only here: JAX takes a second to import, and Ctrl-C has to be met by then.
            from kvjax.command.plan import show_plan
            from kvjax.command.run import run

            return show_plan(config) if "plan" in actions else run(config, interrupts)
    except BaseException as error:
        return exit_code(error, verbose=config is not None and config.verbose)


if __name__ == "__main__":
    sys.exit(main())
