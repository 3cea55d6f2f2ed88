"""What a caller asks for, checked and turned into token ids."""

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from types import NoneType

from kvjax.compress.selectors import Streaming
from kvjax.decoding.conversation import Conversation
from kvjax.decoding.kernel import check_kernel
from kvjax.errors import CapacityError, KvjaxError, ModelError, UsageError
from kvjax.loading import LanguageModel
from kvjax.recipes import Recipe
from kvjax.sharding import shards

LONGEST_CHUNK = 4096
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]


_KINDS = {
    "system_prompt": (str, NoneType),
    "chat": (bool,),
    "thinking": (bool, NoneType),
    "repetition_stop": (bool,),
    "keep_cache": (bool,),
}
_WORDS = {str: "a text", bool: "True or False", NoneType: "None"}


def is_token_id(value: object) -> bool:
    """Whether a value can stand for a token on the device."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and abs(value) < 2**31


def listed(name: str, values: object) -> tuple:
    """The values of an option that takes several.

    Raises:
        UsageError: it is a single value.
    """
    try:
        return tuple(values)
    except TypeError:
        raise UsageError(f"{name} must be a list, got {values!r}") from None


@dataclasses.dataclass(frozen=True)
class Options:
    """How to decode; see ``kvjax.stream`` for each field.

    Raises:
        UsageError: a value out of its range.
    """

    recipe: Recipe
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    batch_size: int
    chunk: int
    system_prompt: str | None
    chat: bool
    thinking: bool | None
    repetition_stop: bool
    stop_ids: tuple[int, ...]
    stop_texts: tuple[str, ...] = ()
    kernel: str | None = None
    samples: int = 1
    keep_cache: bool = False

    def __post_init__(self):
        limits = {
            "max_new_tokens": (1, math.inf),
            "temperature": (0, math.inf),
            "top_k": (0, math.inf),
            "top_p": (0, 1),
            "min_p": (0, 1),
            "seed": (0, 2**32 - 1),
            "batch_size": (1, math.inf),
            "samples": (1, 2**31 - 1),
            "chunk": (1, LONGEST_CHUNK),
        }
        if not isinstance(self.recipe, Recipe):
            raise UsageError(f"recipe must be one of kvjax.recipes, got {self.recipe!r}")
        whole = {"max_new_tokens", "top_k", "seed", "batch_size", "chunk", "samples"}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            kind = numbers.Integral if name in whole else numbers.Real
            if not isinstance(value, kind) or isinstance(value, bool):
                wanted = "a whole number" if name in whole else "a number"
                raise UsageError(f"{name} must be {wanted}, got {value!r}")
            if not low <= value <= high:
                wanted = f"at least {low}" if high == math.inf else f"between {low} and {high}"
                raise UsageError(f"{name} must be {wanted}, got {value}")
        if self.samples > 1 and self.temperature == 0:
            raise UsageError(
                f"samples {self.samples} of greedy decoding are all alike: give a temperature"
            )
        for name, kinds in _KINDS.items():
            if not isinstance(getattr(self, name), kinds):
                wanted = " or ".join(_WORDS[kind] for kind in kinds)
                raise UsageError(f"{name} must be {wanted}, got {getattr(self, name)!r}")
        if not all(map(is_token_id, self.stop_ids)):
            raise UsageError(f"stop_ids must be token ids, got {self.stop_ids!r}")
        if not all(isinstance(text, str) and text for text in self.stop_texts):
            raise UsageError(f"stop_texts must be texts, none empty, got {self.stop_texts!r}")
        check_kernel(self.kernel, self.recipe)


def with_special_stops(lm: LanguageModel, options: Options) -> Options:
    """The options, with the tokens among their stop ids that a stop text is the name of.

    No text of an answer shows a special token, so that its name alone would never be found.

    Raises:
        UsageError: there is no tokenizer, or a stop text holds more than the special token.
    """
    if options.stop_texts and lm.tokenizer is None:
        raise UsageError("stop_texts need a tokenizer, and the model has none: pass stop_ids")
    special = lm.tokenizer.special_ids if options.stop_texts else {}
    for text in options.stop_texts:
        inside = next((name for name in special if name in text and text not in special), None)
        if inside is not None:
            raise UsageError(
                f"stop_texts: {text!r} would never be found, since no text of an answer shows the "
                f"special token {inside!r}: pass that alone, or a text without it"
            )
    named = [special[text] for text in options.stop_texts if text in special]
    return dataclasses.replace(options, stop_ids=(*options.stop_ids, *named))


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt, ready to be read.

    Attributes:
        row: index among the prompts.
        ids: token ids, chat template included; all of a conversation's, where it goes on from one.
        max_new: tokens that may be chosen, as far as the context reaches.
        truncated: the context, and not the caller, set ``max_new``.
        sample: which of the prompt's samples it is.
        past: what it goes on from.
    """

    row: int
    ids: tuple[int, ...]
    max_new: int
    truncated: bool
    sample: int = 0
    past: Conversation | None = None

    @property
    def prompt(self) -> int:
        """Tokens that are read as a prompt; what comes after them is kept as an answer is."""
        return len(self.ids) if self.past is None else self.past.prompt

    @property
    def goes_on(self) -> bool:
        """Whether there is nothing to read: the answer of a conversation goes on."""
        return self.past is not None and len(self.ids) == len(self.past.tokens)

    @property
    def before(self) -> int:
        """Tokens read behind the prompt before the first one is chosen."""
        return len(self.ids) - self.goes_on - self.prompt


def read_prompt(
    lm: LanguageModel,
    row: int,
    prompt: Prompt,
    options: Options,
    past: Conversation | None = None,
) -> Request:
    """Tokenise one prompt and see that it fits.

    Args:
        lm: what ``kvjax.load`` returned.
        row: index among the prompts.
        prompt: the next turn, where there is a ``past``; an empty one lets the answer go on.
        options: of the run.
        past: a conversation to go on from.

    Raises:
        UsageError: an empty prompt, ids out of the vocabulary, messages without a chat template.
        ModelError: text for a model without a tokenizer.
        CapacityError: a prompt that leaves no room in the model's context.
    """
    ids = tuple(map(int, _tokenise(lm, prompt, options, past)))
    if past is not None:
        if not ids and past.answered and past.tokens[-1] in options.stop_ids:
            raise UsageError("the answer has ended: give the next turn as a prompt")
        ids = (*past.tokens, *ids)
    if not ids:
        raise UsageError("the prompt is empty: give it at least one token")
    context = lm.config.context_length
    room = context - len(ids)
    if room < 1:
        raise CapacityError(
            f"the prompt has {len(ids)} tokens and the model's context holds {context}: "
            f"shorten the prompt by at least {1 - room} tokens"
        )
    max_new = min(options.max_new_tokens, room)
    return Request(row, ids, max_new, max_new < options.max_new_tokens, past=past)


def _tokenise(
    lm: LanguageModel, prompt: Prompt, options: Options, past: Conversation | None
) -> Sequence[int]:
    if isinstance(prompt, Mapping):
        raise UsageError(f"a prompt of messages must be a list of them, got {prompt!r}")
    if not isinstance(prompt, str) and all(isinstance(token, numbers.Integral) for token in prompt):
        bad = [token for token in prompt if not 0 <= token < lm.config.vocab_size]
        if bad:
            raise UsageError(
                f"token id {bad[0]} is outside the vocabulary of {lm.config.vocab_size} tokens"
            )
        return prompt
    if lm.tokenizer is None:
        raise ModelError("the model has no tokenizer: name one, or pass prompts of token ids")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UsageError("the prompt is empty: give it at least one word")
        if not (options.chat and lm.tokenizer.has_chat_template):
            return lm.tokenizer.encode(prompt, starts=past is None)
        prompt = [{"role": "user", "content": prompt}]
    messages, thinking = _with_system(prompt, options), options.thinking
    if past is None:
        return lm.tokenizer.encode_chat(messages, thinking=thinking)
    return lm.tokenizer.encode_turn(messages, after=past.tokens[-1], thinking=thinking)


def _with_system(messages: Sequence[Mapping[str, str]], options: Options) -> list[dict[str, str]]:
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise UsageError(f'a message must have "role" and "content", got {message!r}')
    messages = [dict(message) for message in messages]
    if options.system_prompt is None or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": options.system_prompt}, *messages]


def check_sharing(recipe: Recipe, tp: int, copies: int) -> None:
    """Refuse a recipe whose work on the cache devices cannot share.

    Args:
        recipe: how the cache is kept.
        tp: devices that share the heads.
        copies: of them, those that hold the same KV head, for some of its queries each.

    Raises:
        UsageError: with what works.
    """
    by_age = recipe.selector is None or recipe.selector == Streaming()
    if copies > 1 and not (by_age and recipe.retention is None):
        raise UsageError(
            f"tp {tp} is more than the model's {tp // copies} KV heads, and with method "
            f"{recipe.name} devices that hold the same head would keep different tokens of it: "
            f"take tp {tp // copies}, or method full, uniform, kivi or streaming"
        )
    if copies > 1 and recipe.projector is not None:
        raise UsageError(
            f"tp {tp} is more than the model's {tp // copies} KV heads, of which an adapter needs "
            f"each once: take tp {tp // copies}, and spread rows over the others (dp)"
        )


def check_model(recipe: Recipe, lm: LanguageModel) -> None:
    """Refuse a recipe that the model cannot serve.

    Raises:
        UsageError: thresholds or an adapter were made for another model, the text is looked at
            again and there is no tokenizer, or the model's devices cannot share the work.
    """
    check_sharing(recipe, shards(lm.mesh), lm.copies)
    if recipe.needs_text and lm.tokenizer is None:
        raise UsageError(
            f"method {recipe.name} looks at the text again, and {lm.source} has no tokenizer: give "
            "one, or a selector without segments and queries that are the last ones"
        )
    if recipe.projector is not None:
        recipe.projector.for_model(lm.fingerprint, lm.source)
    wanted = getattr(recipe.segmenter, "fingerprint", "")
    if wanted and wanted != lm.fingerprint:
        raise UsageError(
            f"calibration is for a model of fingerprint {wanted[:12]} and not for {lm.source} "
            f"({lm.fingerprint[:12]}): make one with python -m kvjax.calibrate"
        )


def read_prompts(
    lm: LanguageModel,
    prompts: Sequence[Prompt],
    options: Options,
    past: Conversation | None = None,
) -> tuple[list[Request], dict[int, KvjaxError]]:
    """Every prompt that can be read, and the error of every one that cannot.

    Raises:
        UsageError: ``prompts`` is no list of prompts.
        KvjaxError: the only prompt cannot be read.
    """
    several = hasattr(prompts, "__len__") and not isinstance(prompts, str | bytes)
    if not several or not all(
        hasattr(prompt, "__iter__") and not isinstance(prompt, bytes) for prompt in prompts
    ):
        raise UsageError(
            f"prompts must be a list of strings, message lists or token-id lists, got {prompts!r}: "
            "put a single prompt into a list"
        )
    requests, errors = [], {}
    for row, prompt in enumerate(prompts):
        try:
            requests.append(read_prompt(lm, row, prompt, options, past))
        except KvjaxError as error:
            if len(prompts) == 1:
                raise
            errors[row] = error
    return requests, errors
