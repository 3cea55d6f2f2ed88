"""One page and pictures of what evaluations have found: ``python -m kvjax.eval.report --help``.

    python -m kvjax.eval.report DIR

See docs/evaluation.md for what the page shows.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from kvjax.command.entry import run_command
from kvjax.command.options import make_parser, option


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """How the page is called; see each option's help."""

    title: str = option("What compression costs", "of the page")
    verbose: bool = option(False, "show where an error came from")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_command(ReportConfig, report_parser, argv, _start)


def report_parser() -> argparse.ArgumentParser:
    """The folder, and flags of every option."""
    parser = make_parser(
        ReportConfig,
        prog="python -m kvjax.eval.report",
        description="Write report.html, which needs no other file, and its pictures as PNGs into a "
        "folder of results. Prints the page's path.",
        epilog="Exit codes: 0 done, 2 usage, input or output.",
    )
    parser.add_argument("folder", metavar="DIR", help="with the results of any evaluations")
    return parser


def _start(config: ReportConfig, actions, interrupts) -> int:
    from kvjax.command.output import print_out
    from kvjax.eval.page import write_report

    print_out(f"{write_report(actions.folder, config.title)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
