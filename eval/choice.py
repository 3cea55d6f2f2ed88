"""Choices and completions by likelihood under every recipe: ``python -m kvjax.eval.choice --help``.

    python -m kvjax.eval.choice --model M --tasks arc_easy,piqa --data DIR \\
        --recipes recipes.yaml --out DIR

See docs/evaluation.md for the formats and what is written.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from kvjax.command.entry import run_command
from kvjax.command.options import option
from kvjax.errors import UsageError
from kvjax.eval.options import EvalConfig, eval_parser


@dataclasses.dataclass(frozen=True)
class ChoiceConfig(EvalConfig):
    """What is asked; see each option's help."""

    tasks: str | None = option(
        None, "names of files in --data, less their .jsonl, or files: arc_easy,piqa", joined=True
    )
    data: str | None = option(None, "folder that holds TASK.jsonl")
    items: int | None = option(None, "the first N items of each task (default: all)", minimum=1)
    first: int = option(0, "number of the first item", minimum=0)
    batch_size: int = option(32, "choices read together", minimum=1)

    def __post_init__(self):
        """Refuse what can be seen to be wrong before anything is read.

        Raises:
            UsageError: options that do not go together.
        """
        if self.tasks is None:
            raise UsageError("no tasks: name some with --tasks, as in --tasks arc_easy,piqa")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_command(ChoiceConfig, choice_parser, argv, _start)


def choice_parser() -> argparse.ArgumentParser:
    """Flags of every option, and of what is done with them."""
    return eval_parser(
        ChoiceConfig,
        "choice",
        "Read questions into the cache under every recipe and score their answers by likelihood. "
        "Figures go to standard output and, with every item's, to the folder.",
    )


def _start(config: ChoiceConfig, actions, interrupts) -> int:
    from kvjax.eval.choices import run

    return run(config, interrupts)


if __name__ == "__main__":
    sys.exit(main())
