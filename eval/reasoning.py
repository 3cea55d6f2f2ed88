"""Right answers under every recipe: ``python -m kvjax.eval.reasoning --help``.

    python -m kvjax.eval.reasoning --model M --tasks reasoner,gsm8k --data DIR \\
        --recipes recipes.yaml --out DIR

See docs/evaluation.md for the tasks, the recipes' file and what is written.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Literal

from kvjax.command.entry import run_command
from kvjax.command.options import option
from kvjax.errors import UsageError
from kvjax.eval.options import EvalConfig, eval_parser
from kvjax.train.reasoner.task import WIDTHS


@dataclasses.dataclass(frozen=True)
class ReasoningConfig(EvalConfig):
    """What is asked, and how it is answered; see each option's help."""

    tasks: str | None = option(
        None, "what to ask: reasoner, gsm8k, math500, aime24, aime25, or FILE.jsonl", joined=True
    )
    data: str | None = option(None, "folder that holds TASK/test.jsonl")
    levels: str = option("1000,2000", "of the reasoner, tokens of a trace", joined=True)
    problems: int | None = option(
        None, "of each task and level (default: all of a file, 256 of the reasoner)", minimum=1
    )
    first: int = option(0, "number of the first problem", minimum=0)
    limit: float = option(
        1.25,
        "reasoner: an answer of more tokens, in those of the reference, is late",
        minimum=0.01,
    )
    samples: int = option(1, "answers to each problem", minimum=1)
    max_new_tokens: int = option(
        32768, "tokens of an answer at most, the reasoner's apart", "--max-tokens", minimum=1
    )
    temperature: float = option(0.0, "0 is greedy", "--temp", minimum=0)
    top_k: int = option(0, "sample among the N likeliest tokens; 0: all", minimum=0)
    top_p: float = option(
        1.0, "sample among the fewest tokens of this mass", minimum=0, exclusive=True, maximum=1
    )
    system_prompt: str | None = option(None, "put before every question", blank=True)
    thinking: Literal["on", "off", "auto"] = option("auto", "the chat template's thinking block")
    gather: str | None = option(
        None,
        "decode nothing: figures of the rows in this folder's folders, each the --out of a part "
        "of the same run",
    )

    def __post_init__(self):
        """Refuse what can be seen to be wrong before anything is read.

        Raises:
            UsageError: options that do not go together.
        """
        if self.tasks is None:
            raise UsageError("no tasks: name some with --tasks, as in --tasks gsm8k,math500")
        if self.samples > 1 and not self.temperature:
            raise UsageError(
                f"--samples {self.samples}: greedy answers are all alike: pass --temperature"
            )
        for level in self.named_levels():
            if level not in map(str, WIDTHS):
                words = ", ".join(map(str, WIDTHS))
                raise UsageError(f"--levels takes {words}, got {level!r}")

    def named_levels(self) -> list[str]:
        return [level.strip() for level in self.levels.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_command(ReasoningConfig, reasoning_parser, argv, _start)


def reasoning_parser() -> argparse.ArgumentParser:
    """Flags of every option, and of what is done with them."""
    return eval_parser(
        ReasoningConfig,
        "reasoning",
        "Answer problems under every recipe and count what is right. Figures go to standard "
        "output and, with every answer, to the folder.",
    )


def _start(config: ReasoningConfig, actions, interrupts) -> int:
    from kvjax.eval.command import answer
    from kvjax.eval.problems import named_groups
    from kvjax.eval.summary import summarise

    groups = named_groups(
        [name.strip() for name in config.tasks.split(",")],
        data=config.data,
        levels=[int(level) for level in config.named_levels()],
        count=config.problems,
        first=config.first,
        limit=config.limit,
        max_new_tokens=config.max_new_tokens,
    )
    sampling = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p")}
    return answer(
        config,
        interrupts,
        "reasoning",
        groups,
        lambda rows: {"results": summarise(rows, lambda row: row["level"])},
        sampling=sampling,
        samples=config.samples,
        beside=True,
        gather=config.gather,
    )


if __name__ == "__main__":
    sys.exit(main())
