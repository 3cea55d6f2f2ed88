"""From the options of the decode command to the arguments of the library."""

import pathlib
from typing import Any

from kvjax.command.decode_options import DecodeConfig
from kvjax.command.prompts import Row, read_prompt, read_rows, text_row
from kvjax.decoding.requests import Options
from kvjax.errors import ModelError, UsageError
from kvjax.fetch_model import default_model_path
from kvjax.recipes import Recipe


def read_input(config: DecodeConfig) -> list[Row]:
    """The prompts that the options name.

    Raises:
        UsageError: there are none, or they cannot be read.
    """
    if config.prompts:
        return read_rows(config.prompts)
    if config.prompt_file:
        return [read_prompt(config.prompt_file, "--prompt-file")]
    if config.prompt == "-":
        return [read_prompt("-", "--prompt")]
    if config.prompt is None and config.load_cache is not None:
        return [Row(1, [])]  # the answer goes on
    if config.prompt is None:
        raise UsageError("no prompt: give --prompt, --prompt-file or --prompts")
    return [text_row(config.prompt, "--prompt")]


def read_answer(config: DecodeConfig) -> str | None:
    """The text that ``--compare-text`` names.

    Raises:
        UsageError: it cannot be read, or is empty.
    """
    if config.compare_text is None:
        return None
    return read_prompt(config.compare_text, "--compare-text").prompt


def model_source(config: DecodeConfig) -> str:
    """What to load: the model that is named, else the demo model.

    Raises:
        ModelError: there is neither.
    """
    source = config.model or default_model_path()
    if source is None:
        raise ModelError(
            "no model: get the demo model with `python -m kvjax.fetch_model smollm2`, or name one "
            "with --model"
        )
    return str(source)


def model_name(source: str) -> str:
    """What people call a model that was loaded: a hub id, or the last part of a path."""
    path = pathlib.Path(source).expanduser()
    return path.resolve().name if path.exists() else source


def stream_options(config: DecodeConfig, recipe: Recipe) -> dict[str, Any]:
    """What the options mean to ``kvjax.stream``."""
    return {
        "recipe": recipe,
        "max_new_tokens": config.max_new_tokens,
        "temperature": 0.0 if config.greedy else config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "min_p": config.min_p,
        "seed": config.seed,
        "batch_size": config.batch_size,
        "system_prompt": config.system_prompt,
        "chat": config.chat_template,
        "thinking": {"on": True, "off": False, "auto": None}[config.thinking],
        "repetition_stop": config.repetition_stop,
        "stop_texts": config.stop,
        "kernel": config.kernel,
        "samples": config.samples,
        "keep_cache": config.save_cache is not None,
    }


def prompt_options(config: DecodeConfig, recipe: Recipe) -> Options:
    """Options to read prompts with: how tokens are chosen, and what becomes of them, makes no
    difference to a prompt."""
    choice = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "samples": 1}
    return Options(**{**stream_options(config, recipe), **choice}, chunk=1, stop_ids=())
