"""Facts found again in long prompts, under every recipe: ``python -m kvjax.eval.retrieval --help``.

    python -m kvjax.eval.retrieval --model M --lengths 1024,4096 --recipes recipes.yaml --out DIR
    python -m kvjax.eval.retrieval --model M --tasks ruler/niah_multikey_3.jsonl --problems 100 \\
        --max-new-tokens 128 --no-chat-template --recipes recipes.yaml --out DIR

See docs/evaluation.md for the prompts and what is written.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from kvjax.command.entry import run_command
from kvjax.command.options import option
from kvjax.errors import UsageError
from kvjax.eval.options import EvalConfig, eval_parser

TASKS = ("needle", "pairs")


@dataclasses.dataclass(frozen=True)
class RetrievalConfig(EvalConfig):
    """What is hidden, and where; see each option's help."""

    tasks: str = option(
        "needle,pairs",
        "needle: one sentence in a text; pairs: one of many keys; or files of RULER that end in "
        ".jsonl, each line with an input and outputs",
        joined=True,
    )
    lengths: str = option("1024,2048,4096", "tokens of a prompt", joined=True)
    depths: str = option(
        "0,0.25,0.5,0.75,1", "share of the prompt before what is to be found", joined=True
    )
    problems: int = option(8, "of each length and depth, or the first of a file", minimum=1)
    max_new_tokens: int = option(16, "tokens of an answer", minimum=1)
    chat_template: bool = option(True, "pass prompts through the model's chat template")

    def __post_init__(self):
        """Refuse what can be seen to be wrong before anything is read.

        Raises:
            UsageError: options that cannot be used.
        """
        if unknown := [name for name in self.generated() if name not in TASKS]:
            raise UsageError(
                f"--tasks takes {', '.join(TASKS)} and files that end in .jsonl, got {unknown[0]!r}"
            )
        if len({path.stem for path in self.files()}) < len(self.files()):
            raise UsageError("--tasks: a task stands twice (a file is named without its folder)")
        if min(self.numbers("lengths", int)) < 1:
            raise UsageError(f"--lengths must be above 0, got {self.lengths}")
        depths = self.numbers("depths", float)
        if not all(0 <= depth <= 1 for depth in depths):
            raise UsageError(f"--depths must be from 0 to 1, got {self.depths}")

    def generated(self) -> list[str]:
        """The tasks that are no files."""
        return [name for name in self._names() if not name.endswith(".jsonl")]

    def files(self) -> list[pathlib.Path]:
        return [pathlib.Path(name) for name in self._names() if name.endswith(".jsonl")]

    def _names(self) -> list[str]:
        return list(dict.fromkeys(name.strip() for name in self.tasks.split(",")))

    def numbers(self, name: str, kind: type) -> list:
        """The numbers of an option.

        Raises:
            UsageError: one is none.
        """
        text = getattr(self, name)
        try:
            return list(dict.fromkeys(kind(part) for part in text.split(",")))
        except ValueError:
            raise UsageError(f"--{name} takes numbers and commas, got {text!r}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_command(RetrievalConfig, retrieval_parser, argv, _start)


def retrieval_parser() -> argparse.ArgumentParser:
    """Flags of every option, and of what is done with them."""
    return eval_parser(
        RetrievalConfig,
        "retrieval",
        "Hide facts in generated prompts and ask for them under every recipe. Figures go to "
        "standard output and, with every answer, to the folder.",
    )


def _start(config: RetrievalConfig, actions, interrupts) -> int:
    from kvjax.eval.command import answer
    from kvjax.eval.haystack import hidden_groups
    from kvjax.eval.recipes import shape_of
    from kvjax.eval.ruler import ruler_group
    from kvjax.eval.summary import summarise

    groups = hidden_groups(shape_of(config), config)
    groups += [ruler_group(path, config.problems, config.max_new_tokens) for path in config.files()]

    def summary(rows):
        return {
            "results": summarise(rows, lambda row: row["level"]),
            "by_depth": summarise(
                [row for row in rows if "depth" in row],
                lambda row: (row["level"], row["depth"]),
            ),
        }

    return answer(
        config,
        interrupts,
        "retrieval",
        groups,
        summary,
        sampling={"temperature": 0.0},
        samples=1,
        beside=False,
    )


if __name__ == "__main__":
    sys.exit(main())
