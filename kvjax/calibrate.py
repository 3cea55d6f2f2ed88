"""Find a model's kinds of thought, for ThinKV: ``python -m kvjax.calibrate --help``."""

import dataclasses
import sys
from collections.abc import Sequence

from kvjax.command.calibrate_options import CalibrateConfig, calibrate_parser
from kvjax.command.errors import exit_code
from kvjax.command.interrupt import Interrupts
from kvjax.command.options import parse
from kvjax.command.output import prepare_streams, print_out
from kvjax.command.yaml_file import dump_yaml


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    config = None
    prepare_streams()
    try:
        config, actions = parse(CalibrateConfig, calibrate_parser(), argv)
        if "print_config" in actions:
            print_out(dump_yaml(dataclasses.asdict(config)))
            return 0
        with Interrupts() as interrupts:
            # Only here: JAX takes a second to import, and Ctrl-C has to be met by then.
            from kvjax.command.calibrate_run import run
            from kvjax.command.devices import check_devices

            check_devices()
            return run(config, interrupts, getattr(actions, "config", None))
    except BaseException as error:
        return exit_code(error, verbose=config is not None and config.verbose)


if __name__ == "__main__":
    sys.exit(main())
