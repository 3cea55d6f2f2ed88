"""What every command does around its own work: options, interrupts, and an exit code."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kvjax.command.errors import exit_code
from kvjax.command.interrupt import Interrupts
from kvjax.command.options import parse
from kvjax.command.output import prepare_streams, print_out
from kvjax.command.yaml_file import dump_yaml


def run_command(
    kind: type,
    parser: Callable[[], argparse.ArgumentParser],
    argv: Sequence[str] | None,
    start: Callable[[Any, Any, Interrupts], int],
) -> int:
    """Run a command; returns its exit code.

    Args:
        kind: dataclass of the options, which has a ``verbose``.
        parser: makes the parser of the flags.
        argv: the arguments, those of the process if None.
        start: does the work, of the options, the parsed actions and the interrupts. It imports what
            needs JAX itself: that takes a second, and Ctrl-C has to be met by then.
    """
    config = None
    prepare_streams()
    try:
        config, actions = parse(kind, parser(), argv)
        if "print_config" in actions:
            print_out(dump_yaml(dataclasses.asdict(config)))
            return 0
        with Interrupts() as interrupts:
            from kvjax.command.devices import start_devices

            start_devices(config)
            return start(config, actions, interrupts)
    except BaseException as error:
        return exit_code(error, verbose=config is not None and config.verbose)


def run_parsed(
    parse: Callable[[Sequence[str] | None], argparse.Namespace],
    argv: Sequence[str] | None,
    start: Callable[[argparse.Namespace, Interrupts], int],
) -> int:
    """``run_command`` for a command whose options argparse reads alone.

    Args:
        parse: from the arguments, those of the process if None, to options with a ``verbose``.
        argv: the arguments.
        start: does the work, of the options and the interrupts.
    """
    verbose = False
    try:
        args = parse(argv)
        verbose = args.verbose
        with Interrupts() as interrupts:
            return start(args, interrupts)
    except BaseException as error:
        return exit_code(error, verbose=verbose)
