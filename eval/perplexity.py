"""Perplexity of a text under every recipe: ``python -m kvjax.eval.perplexity --help``.

    python -m kvjax.eval.perplexity --model M --text FILE --window 1024 --stride 512 \\
        --recipes recipes.yaml --out DIR

See docs/evaluation.md for what is scored and what is written.
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
class PerplexityConfig(EvalConfig):
    """What is read, and in which pieces; see each option's help."""

    text: str | None = option(None, "file of plain text")
    tokens: int | None = option(None, "the first N tokens of it (default: all)", minimum=2)
    window: int = option(1024, "tokens read together", minimum=2)
    stride: int = option(512, "the last tokens of a window, which are scored", minimum=1)

    def __post_init__(self):
        """Refuse what can be seen to be wrong before anything is read.

        Raises:
            UsageError: options that do not go together.
        """
        if self.text is None:
            raise UsageError("no text: name a file with --text")
        if self.stride >= self.window:
            raise UsageError(
                f"--stride {self.stride} must be below --window {self.window}: what is scored "
                "follows at least one token"
            )
        if self.tokens is not None and self.tokens < self.window:
            raise UsageError(f"--tokens {self.tokens} is below --window {self.window}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_command(PerplexityConfig, perplexity_parser, argv, _start)


def perplexity_parser() -> argparse.ArgumentParser:
    """Flags of every option, and of what is done with them."""
    return eval_parser(
        PerplexityConfig,
        "perplexity",
        "Read a text in windows under every recipe and score the last tokens of each. Figures go "
        "to standard output and, with every window's, to the folder.",
    )


def _start(config: PerplexityConfig, actions, interrupts) -> int:
    from kvjax.eval.windows import run

    return run(config, interrupts)


if __name__ == "__main__":
    sys.exit(main())
