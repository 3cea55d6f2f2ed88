"""Train DynaKV's bases and gates for a model: ``python -m kvjax.train_dynakv --help``."""

import dataclasses
import sys
from collections.abc import Sequence

from kvjax.command.errors import exit_code
from kvjax.command.interrupt import Interrupts
from kvjax.command.options import parse
from kvjax.command.output import prepare_streams, print_out
from kvjax.command.train_dynakv_options import TrainDynaKVConfig, train_dynakv_parser
from kvjax.command.yaml_file import dump_yaml


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    config = None
    prepare_streams()
    try:
        config, actions = parse(TrainDynaKVConfig, train_dynakv_parser(), argv)
        if "print_config" in actions:
            print_out(dump_yaml(dataclasses.asdict(config)))
            return 0
        with Interrupts() as interrupts:
            # Only here: JAX takes a second to import, and Ctrl-C has to be met by then.
            from kvjax.command.devices import check_devices
            from kvjax.command.train_dynakv_run import run

            check_devices()
            return run(config, interrupts, getattr(actions, "config", None))
    except BaseException as error:
        return exit_code(error, verbose=config is not None and config.verbose)


if __name__ == "__main__":
    sys.exit(main())
