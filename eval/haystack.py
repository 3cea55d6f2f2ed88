"""Prompts in which a number is hidden: generated, the same ones whenever they are asked for."""

import math
import random
from collections.abc import Callable

from kvjax.command.inputs import prompt_options
from kvjax.decoding.requests import read_prompt
from kvjax.errors import CapacityError, UsageError
from kvjax.eval.problems import Group, Problem, judge_contains
from kvjax.eval.retrieval import RetrievalConfig
from kvjax.loading import LanguageModel
from kvjax.recipes import full

_PLACES = [
    "harbour",
    "garden",
    "library",
    "station",
    "market",
    "mill",
    "bridge",
    "tower",
    "museum",
    "bakery",
]
_TIMES = ("In the morning", "At noon", "On most days", "In winter", "After the rain", "By evening")
_WHO = [
    "the baker",
    "a teacher",
    "the old captain",
    "two children",
    "the painter",
    "a visitor",
    "the guard",
]
_DOES = (
    "walks past the {}",
    "looks at the {} for a while",
    "talks about the {} and its history",
    "waits near the {} for a friend",
    "draws the {} from memory",
    "cleans the windows of the {}",
)
_NAMES = [
    "amber",
    "basil",
    "cedar",
    "delta",
    "ember",
    "flint",
    "grove",
    "hazel",
    "ivory",
    "jasper",
    "karst",
    "lotus",
    "maple",
    "nectar",
    "onyx",
    "pearl",
    "quartz",
    "raven",
    "slate",
    "topaz",
    "umber",
    "violet",
    "willow",
    "yarrow",
    "zephyr",
    "birch",
    "coral",
    "dune",
    "fern",
    "heath",
]


def hidden_groups(lm: LanguageModel, config: RetrievalConfig) -> list[Group]:
    """Every task and length, each with problems of all depths.

    Args:
        lm: the model, or its shape; its tokenizer and template decide how much fits.
        config: lengths, depths, how many, and the seed.

    Raises:
        UsageError: a length is too short to hide anything, or longer than the context.
    """
    if lm.tokenizer is None:
        raise UsageError(f"{lm.source} has no tokenizer: name one with --tokenizer")
    options = prompt_options(config.decoding(), full())

    def count(prompt: str) -> float:
        try:
            return len(read_prompt(lm, 0, prompt, options).ids)
        except CapacityError:  # of a longer try than will be taken
            return math.inf

    groups = []
    for task in config.generated():
        for length in config.numbers("lengths", int):
            if length + config.max_new_tokens > lm.config.context_length:
                raise UsageError(
                    f"--lengths {length}: with {config.max_new_tokens} new tokens it exceeds the "
                    f"model's context of {lm.config.context_length}"
                )
            problems = [
                _problem(task, length, depth, index, config.seed, count)
                for depth in config.numbers("depths", float)
                for index in range(config.problems)
            ]
            new = config.max_new_tokens
            groups.append(Group(task, problems, judge_contains, new, new))
    return groups


def _problem(
    task: str,
    length: int,
    depth: float,
    index: int,
    seed: int,
    count: Callable[[str], float],
) -> Problem:
    """The longest prompt of at most ``length`` tokens."""
    rng = random.Random(f"{seed}/{task}/{length}/{depth}/{index}")
    ask, wanted, head, other = _WRITERS[task](rng)
    lines: list[str] = []

    def text(others: int) -> str:
        while len(lines) < others:
            lines.append(other())
        at = round(depth * others)
        return "\n".join([head, *lines[:at], wanted[0], *lines[at:others], "", ask])

    low, high = 0, max(length, 1)
    if count(text(0)) > length:
        raise UsageError(
            f"--lengths {length} is too short for {task}, which takes {count(text(0))}"
        )
    while low < high:  # a line takes more than one token
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(text(middle)) <= length else (low, middle - 1)
    name = f"{depth:g}-{index}"
    return Problem(name, text(low), wanted[1], length, depth=depth)


def _needle(rng: random.Random):
    name, number = rng.choice(_NAMES), str(rng.randint(10_000, 99_999))

    def other() -> str:
        what = rng.choice(_DOES).format(rng.choice(_PLACES))
        return f"{rng.choice(_TIMES)}, {rng.choice(_WHO)} {what}."

    head = "Read the text and remember the secret number in it."
    ask = f"What is the secret number of {name}? Answer with the number alone."
    return ask, (f"The secret number of {name} is {number}.", number), head, other


def _pairs(rng: random.Random):
    used: set[str] = set()

    def key() -> str:
        while True:
            found = f"{rng.choice(_NAMES)}-{rng.choice(_NAMES)}-{rng.randint(10, 99)}"
            if found not in used:
                used.add(found)
                return found

    def line(name: str) -> tuple[str, str]:
        number = str(rng.randint(10_000, 99_999))
        return f"{name}: {number}", number

    name = key()
    head = "Each line has a key and its number."
    ask = f"What is the number of {name}? Answer with the number alone."
    return ask, line(name), head, lambda: line(key())[0]


_WRITERS = {"needle": _needle, "pairs": _pairs}
