"""The options of ``python -m kvjax.decode``."""

import argparse
import dataclasses
from typing import Literal

from kvjax.command.options import make_parser, option
from kvjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """What a run does; see each option's help."""

    model: str | None = option(
        None, "model directory, GGUF file or hub id (default: the demo model)"
    )
    revision: str | None = option(None, "branch, tag or commit of a hub id")
    tokenizer: str | None = option(None, "directory or hub id of another tokenizer")
    dtype: Literal["float32", "bfloat16"] = option("float32", "of the weights and activations")
    prompt: str | None = option(None, "the prompt; - reads standard input", "-p", group="prompt")
    prompt_file: str | None = option(None, "a text file that holds the prompt", group="prompt")
    prompts: str | None = option(
        None,
        'a file of JSON lines, each {"id": ..., "prompt": ...} or {"id": ..., "messages": [...]}; '
        "- reads standard input",
        group="prompt",
    )
    output: str | None = option(None, "file for the answers instead of standard output", "-o")
    format: Literal["text", "json", "jsonl"] | None = option(
        None, "default: text, or jsonl with --prompts; json is a list with --prompts"
    )
    system_prompt: str | None = option(None, "put before prompts that have no system message")
    chat_template: bool = option(True, "pass prompts through the model's chat template")
    thinking: Literal["on", "off", "auto"] = option("auto", "the chat template's thinking block")
    max_new_tokens: int = option(256, "tokens to generate at most", "--max-tokens", minimum=1)
    temperature: float | None = option(
        None,
        "0 is greedy (default, also of the next three: the model's own)",
        "--temp",
        minimum=0,
        group="sampling",
    )
    top_k: int | None = option(None, "sample among the N likeliest tokens; 0: all", minimum=0)
    top_p: float | None = option(
        None, "sample among the fewest tokens of this mass", minimum=0, exclusive=True, maximum=1
    )
    min_p: float | None = option(
        None, "sample among tokens this many times as likely as the likeliest", minimum=0, maximum=1
    )
    seed: int = option(0, "of the samples", minimum=0, maximum=2**32 - 1)
    greedy: bool = option(False, "the likeliest token always", group="sampling")
    batch_size: int = option(8, "prompts decoded together", minimum=1)
    method: Literal["full"] = option("full", "how the cache is kept")
    page_size: int = option(64, "cache slots a page, a power of two", minimum=1)
    repetition_stop: bool = option(True, "end an answer that has fallen into a loop")
    stream: bool | None = option(None, "print text as it comes (default: on a terminal)")
    stats: bool | None = option(None, "the figures below the answer (default: on a terminal)")
    quiet: bool = option(False, "no progress line, and no figures without --stats")
    verbose: bool = option(False, "show where an error came from")

    def __post_init__(self):
        """Refuse what can be seen to be wrong before anything is read.

        Raises:
            UsageError: options that do not go together.
        """
        if self.page_size & (self.page_size - 1):
            raise UsageError(f"--page-size must be a power of two, got {self.page_size}")
        if self.system_prompt is not None and not self.chat_template:
            raise UsageError("--system-prompt needs the chat template: drop --no-chat-template")
        if self.prompts and self.stream:
            raise UsageError("--stream is for one prompt: leave it out with --prompts")
        if self.stream and self.answer_format != "text":
            raise UsageError(f"--stream prints text: leave it out with --format {self.format}")

    @property
    def answer_format(self) -> Literal["text", "json", "jsonl"]:
        """The format, with its default settled."""
        return self.format or ("jsonl" if self.prompts else "text")


def decode_parser() -> argparse.ArgumentParser:
    """Flags of every option, and of what is done with them."""
    parser = make_parser(
        DecodeConfig,
        prog="python -m kvjax.decode",
        description="Decode answers to prompts. Answers go to standard output, all else to "
        "standard error.",
        epilog="Exit codes: 0 done, 2 usage, input or output, 3 the model cannot be loaded, 4 does "
        "not fit, 5 NaN or infinity, 6 some prompts failed, 130 interrupted.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; flags win over it")
    parser.add_argument(
        "--print-config", action="store_true", help="print the options as such a file and leave"
    )
    parser.add_argument(
        "--plan", action="store_true", help="print what would be allocated, without loading weights"
    )
    return parser
