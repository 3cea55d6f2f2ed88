"""A run before its weights are loaded: what it would allocate, from the model's shape alone."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx

from kvjax import loading, tokenizer
from kvjax.cache import Plan, plan
from kvjax.cache.fitting import plan_of_longest
from kvjax.cache.plan import answer_tokens, least_budget
from kvjax.command.decode_options import DecodeConfig
from kvjax.command.inputs import model_source, prompt_options
from kvjax.command.prompts import Row
from kvjax.command.recipe import flags_in_errors
from kvjax.decoding.conversation import Conversation
from kvjax.decoding.requests import check_sharing, read_prompt
from kvjax.decoding.saved import skim_cache
from kvjax.errors import CapacityError, KvjaxError
from kvjax.models.decoder import Decoder
from kvjax.recipes import Recipe, full, parse
from kvjax.sharding import check_mesh, copies, device_bytes, widened
from kvjax.weights.gguf import GGUFCheckpoint

_BATCH_SIZE = DecodeConfig.batch_size


@dataclasses.dataclass(frozen=True)
class Outline:
    """What a plan needs to know of a run.

    Attributes:
        request: arguments of ``kvjax.cache.plan`` beside the recipe and the memory.
        lengths: tokens of the prompts that can be read; of a conversation and its next turn.
        copies: devices that hold the same KV head.
        text: tokens of the text that rows are compared on, if one is given.
        since: tokens of a conversation and its next turn behind its first prompt: they are kept as
            an answer is.
    """

    request: dict[str, Any]
    lengths: list[int]
    copies: int = 1
    text: int | None = None
    since: int = 0

    def plan(self, recipe: Recipe, memory_bytes: int | None = None) -> Plan:
        """The plan of a recipe.

        Raises:
            UsageError: the recipe does not fit the model, the prompts or the devices.
        """
        check_sharing(recipe, self.request.get("tp", 1), self.copies)
        given = self.request | {"shortest_prompt": self.shortest_prompt}
        return plan(recipe=recipe, memory_bytes=memory_bytes, **given)

    def plan_of_longest(self, recipe: Recipe, memory_bytes: int | None) -> Plan:
        """The plan of the run: of the longest prompt that fits, as ``kvjax.stream`` makes it.

        Raises:
            UsageError: the recipe does not fit the model or the prompts.
            CapacityError: no prompt fits the memory.
        """

        def planned(tokens: int) -> Plan:
            sized = dataclasses.replace(self, request=self.request | {"prompt_tokens": tokens})
            return sized.plan(recipe, memory_bytes)

        config, new = self.request["config"], self.request["max_new_tokens"]
        prompts = [length - self.since for length in self.lengths]
        return plan_of_longest(config, prompts or [self.prompt_tokens], new, planned)[1]

    def check_comparison(
        self, config: DecodeConfig, recipe: Recipe, memory_bytes: int | None
    ) -> None:
        """Refuse a comparison that no prompt leaves room for.

        Raises:
            CapacityError: the answer without compression, or the text, does not fit.
        """
        request = self.request | {"batch_size": 1}
        what, advice = "the answer without compression", "a --compare-text"
        if self.text is None:
            recipe = parse("full", page_size=config.page_size)
        else:  # each device has all of the cache then
            what, advice = "the text", "a shorter text"
            request |= {"max_new_tokens": self.text, "tp": 1}
        try:
            dataclasses.replace(self, request=request).plan_of_longest(recipe, memory_bytes)
        except CapacityError as error:
            raise CapacityError(f"--compare full: {what}: {error}, or {advice}") from error

    def least_budget(self, recipe: Recipe) -> int:
        """The smallest budget that the run can keep to."""
        config, new = self.request["config"], self.request["max_new_tokens"]
        longest = answer_tokens(config, self.shortest_prompt, new)
        return least_budget(recipe, self.prompt_tokens, longest)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return self.request["prompt_tokens"]

    @property
    def shortest_prompt(self) -> int:
        """Tokens of the shortest one."""
        return min(self.lengths, default=self.prompt_tokens)


def outline(config: DecodeConfig, rows: list[Row], text: str | None = None) -> Outline:
    """The outline of a run.

    Args:
        config: the options.
        rows: the prompts.
        text: of ``--compare-text``, if there is one.

    Raises:
        KvjaxError: the model's configuration or tokenizer cannot be read, or the only prompt,
            unless it comes from a file of prompts; or the text fits behind no prompt.
    """
    lm = shape_of_model(config)
    past = _saved(config)
    lengths = prompt_lengths(lm, rows, config, past)
    answer = None
    if text is not None and lengths:
        answer = _checked_text(lm, text, min(lengths))
    since = 0 if past is None else lengths[0] - past.prompt
    together = min(config.batch_size, config.samples * len(lengths) or config.batch_size)
    request = {
        "config": lm.config,
        "batch_size": -(-together // config.dp),
        "tp": config.tp,
        "parks": config.samples > 1,
        "prompt_tokens": max(lengths, default=1) - since,
        "max_new_tokens": config.max_new_tokens + since,
        "dtype": lm.dtype,
        "parameter_bytes": device_bytes(lm.model, config.tp),
    }
    return Outline(request, lengths, lm.copies, answer, since)


def _saved(config: DecodeConfig) -> Conversation | None:
    """What ``--load-cache`` names, if anything, but for what its cache holds.

    Raises:
        UsageError: it cannot be read.
    """
    if config.load_cache is None:
        return None
    with flags_in_errors():
        return skim_cache(config.load_cache)


def prompt_lengths(
    lm: loading.LanguageModel, rows: list[Row], config: DecodeConfig, past: Conversation | None
) -> list[int]:
    """Tokens of every prompt that can be read, those of what it goes on from among them.

    Raises:
        KvjaxError: the only prompt cannot, unless it comes from a file of prompts.
    """
    options = prompt_options(config, full())
    lengths = []
    for row in rows:
        if row.prompt is None:
            continue
        try:
            lengths.append(len(read_prompt(lm, 0, row.prompt, options, past).ids))
        except KvjaxError:
            if not config.prompts:
                raise
    return lengths


def _checked_text(lm: loading.LanguageModel, text: str, prompt: int) -> int:
    """Tokens of a text to compare on.

    Raises:
        CapacityError: a prompt of so many tokens leaves no room for it.
    """
    tokens = len(lm.tokenizer.encode(text, starts=False))
    context = lm.config.context_length
    room = context - prompt
    if tokens > room:
        raise CapacityError(
            f"--compare-text: the text has {tokens} tokens, and the model's context of {context} "
            f"leaves {room} behind a prompt of {prompt} tokens: shorten the text by at least "
            f"{tokens - room} tokens"
        )
    return tokens


def limits(config: DecodeConfig, context: int, lengths: list[int]) -> list[str]:
    """What the model and the prompts leave of the options, where that is less than was asked for.

    Args:
        config: the options; a batch size that is the default is nobody's wish.
        context: tokens that the model's context holds.
        lengths: tokens of the prompts, as ``prompt_lengths`` counts them.
    """
    found, longest = [], max(lengths, default=1)
    if config.max_new_tokens > context - longest:
        what = "the longest prompt" if config.load_cache is None else "what has been read"
        found.append(
            f"--max-new-tokens {config.max_new_tokens}: the model's context of {context} tokens "
            f"leaves {context - longest} beside {what}"
        )
    answers = len(lengths) * config.samples
    if lengths and config.batch_size > answers and config.batch_size != _BATCH_SIZE:
        what = "prompts" if config.samples == 1 else "answers"
        found.append(f"--batch-size {config.batch_size}: there are {answers} {what}")
    return found


def shape_of_model(config: DecodeConfig) -> loading.LanguageModel:
    """The model with shapes in the place of its weights.

    Raises:
        ModelError: its configuration or tokenizer cannot be read.
        UsageError: the devices cannot share it.
    """
    source = model_source(config)
    path = loading.resolve(source, config.revision, weights=False)
    shape = loading.read_config(path)
    with flags_in_errors():
        check_mesh(shape, config.tp)
    dtype = jnp.dtype(config.dtype)
    text = path if config.tokenizer is None else loading.resolve(config.tokenizer, weights=False)
    own = widened(shape, config.tp)
    return loading.LanguageModel(
        config=own,
        model=nnx.eval_shape(lambda: Decoder(own, dtype=dtype, rngs=nnx.Rngs(0))),
        tokenizer=_tokenizer(text),
        dtype=dtype,
        defaults=loading.GenerationDefaults(),
        source=source,
        revision=config.revision,
        fingerprint="",
        copies=copies(shape, config.tp),
    )


def _tokenizer(path) -> tokenizer.Tokenizer | None:
    if path.is_file():
        checkpoint = GGUFCheckpoint(path)
        return tokenizer.from_gguf(checkpoint.source, checkpoint.metadata)
    return tokenizer.from_directory(path)
