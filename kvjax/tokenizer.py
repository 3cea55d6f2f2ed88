"""Text to token ids and back."""

import contextlib
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from kvjax.errors import ModelError, UsageError
from kvjax.weights.gguf_tokenizer import build_tokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_THINK = "<think>"
_THINK_TAIL = 8  # tokens at a prompt's end among which the opening tag is looked for
_PROBE = "@@kvjax@@"
_MOST_ADDED = 1 << 20
"""Characters that a chat template may add, which is more than any has."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A model's tokenizer and chat template.

    Attributes:
        stop_ids: tokens that end an answer, as far as the tokenizer itself knows.
        bos_id: the token that every sequence starts with, None if there is none.
        eos_id: the token that ends a text, None if there is none.
        special_ids: the special tokens by their names; no decoded text shows them.
        vocab_size: the largest id and one, however many ids below it are no token's.
        has_chat_template: whether `encode_chat` can be used.
    """

    def __init__(self, wrapped: Any, *, bos_id: int | None, stop_ids: Iterable[int] = ()):
        """Wrap a tokenizer of transformers.

        Args:
            wrapped: a PreTrainedTokenizerFast.
            bos_id: the token that every sequence starts with, None if there is none.
            stop_ids: tokens known to end an answer.
        """
        self._wrapped = wrapped
        self._backend: tokenizers.Tokenizer = wrapped.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.bos_id = bos_id
        self.eos_id: int | None = wrapped.eos_token_id
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = {token.content: i for i, token in added.items() if token.special}
        self._special = frozenset(self.special_ids.values())
        ids = self._backend.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        self.has_chat_template = bool(wrapped.chat_template)
        ends = (wrapped.eos_token_id, self._end_of_turn(), *stop_ids)
        self.stop_ids = tuple(sorted({index for index in ends if index is not None}))

    def encode(self, text: str, *, starts: bool = True) -> list[int]:
        """Token ids, with exactly one BOS in front where the model wants one.

        Args:
            text: any.
            starts: False for a text that goes on from another one.
        """
        try:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise UsageError(f"the text is not valid Unicode ({error}); clean it first") from error
        if not starts or self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], *, thinking: bool | None = None
    ) -> list[int]:
        """Token ids of a conversation, up to where the model's answer starts.

        Args:
            messages: the turns, each with "role" and "content".
            thinking: whether the model is to think first, None for the template's own choice.

        Raises:
            UsageError: the template refuses the messages, or cannot do what `thinking` asks.
            ModelError: it is damaged.
        """
        ids = self.encode(self._rendered(messages, thinking))
        return self._as_wished(ids, thinking)

    def encode_turn(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        after: int,
        thinking: bool | None = None,
    ) -> list[int]:
        """Token ids of the next turn of a conversation, up to where the model's answer starts.

        That is what the template puts behind an answer: the end of that turn and the new messages.
        What it begins a conversation with is not repeated.

        Args:
            messages: the new ones.
            after: the last token of the conversation. If it is the answer's end already, there is
                no second one.
            thinking: as for `encode_chat`.

        Raises:
            UsageError: likewise.
            ModelError: likewise.
        """
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        text = self._rendered([*turns, *messages], thinking)
        ids = self.encode(text.partition(_PROBE)[2], starts=False)
        if not ids:
            raise UsageError("the chat template shows no answers: pass the next turn as token ids")
        return self._as_wished(ids[1:] if ids[0] == after else ids, thinking)

    def _rendered(self, messages: Sequence[Mapping[str, str]], thinking: bool | None) -> str:
        """Messages up to where the model's answer starts."""
        switch = {} if thinking is None else {"enable_thinking": thinking}
        return self._render(messages, add_generation_prompt=True, **switch)

    def _as_wished(self, ids: list[int], thinking: bool | None) -> list[int]:
        """The ids of messages, if they leave thinking switched as it was asked for."""
        if thinking is None or "enable_thinking" in self._wrapped.get_chat_template():
            return ids
        if self.thinking_open(ids) != thinking:
            want = "on" if thinking else "off"
            raise UsageError(
                f"thinking cannot be turned {want}: this model's chat template has no switch for "
                "it; leave it to the template (auto)"
            )
        return ids

    def thinking_open(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends inside a think block that the template opened."""
        tail = self._backend.decode(prompt_ids[-_THINK_TAIL:], skip_special_tokens=False)
        return tail.rstrip().endswith(_THINK)

    def decode(self, ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def texts(self) -> list[str]:
        """What every token decodes to on its own, special ones to nothing."""
        alone = [[index] for index in range(self.vocab_size)]
        return self._backend.decode_batch(alone, skip_special_tokens=True)

    def detokenizer(self) -> "Detokenizer":
        """A fresh streaming decoder."""
        return Detokenizer(self._backend, self._special)

    def _render(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        from jinja2.exceptions import TemplateError

        if not self.has_chat_template:
            raise UsageError("this model has no chat template; pass the prompt as plain text")
        try:
            text = self._wrapped.apply_chat_template(list(messages), tokenize=False, **options)
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"the chat template refuses the messages: {error}") from error
        except Exception as error:  # whatever else a damaged template makes it raise
            raise ModelError(
                f"the chat template fails ({type(error).__name__}: {_first_line(error)}); do "
                "without it (--no-chat-template), or pass another tokenizer"
            ) from error
        if len(text) > _MOST_ADDED + 2 * len(str(messages)):  # cutting it could take all memory
            raise ModelError(
                f"the chat template adds {len(text):,} characters, more than {_MOST_ADDED:,}; do "
                "without it (--no-chat-template), or pass another tokenizer"
            )
        return text

    def _end_of_turn(self) -> int | None:
        """The special token that the template writes right behind an answer."""
        if not self.has_chat_template:
            return None
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        try:
            behind = self._render(turns).rpartition(_PROBE)[2].lstrip()
            first = self.encode(behind, starts=False)[:1]
        except (UsageError, ModelError):
            return None
        return first[0] if first and first[0] in self._special else None


class Detokenizer:
    """Decodes tokens as they come, in pieces that join to exactly what decoding all at once gives.

    A piece never ends inside a character: tokens wait until those that complete it are there.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: frozenset[int]):
        self._backend = backend
        self._skipped = special
        # Byte tokens of SentencePiece vocabularies are only decoded once their run has ended.
        self._bytes = frozenset(
            index
            for byte in range(256)
            if (index := backend.token_to_id(f"<0x{byte:02X}>")) is not None
        )
        self._context: list[int] = []  # the tokens of the last piece: how the next ones look
        self._waiting: list[int] = []  # depends on what they follow

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        return "".join(self._push(index) for index in ids)

    def flush(self) -> str:
        """The text of the tokens that still wait, at the end."""
        piece = self._piece()
        self._context, self._waiting = [], []
        return piece

    def _push(self, index: int) -> str:
        if index in self._skipped or self._backend.id_to_token(index) is None:
            return ""
        self._waiting.append(index)
        if index in self._bytes:
            return ""
        piece = self._piece()
        if not piece or piece.endswith(_REPLACEMENT):
            return ""
        self._context, self._waiting = self._waiting, []
        return piece

    def _piece(self) -> str:
        before = self._backend.decode(self._context)
        return self._backend.decode(self._context + self._waiting)[len(before) :]


def from_directory(directory: pathlib.Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face model directory, None if it holds none."""
    if not any((directory / name).exists() for name in _TOKENIZER_FILES):
        return None
    with _quiet_transformers():
        from transformers import AutoTokenizer

        try:
            wrapped = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # whatever a damaged or foreign file makes it raise
            raise ModelError(
                f"{directory}: the tokenizer cannot be loaded ({_first_line(error)}); fetch it "
                "again or pass another directory or hub id as the tokenizer"
            ) from error
    if not wrapped.is_fast:
        raise ModelError(
            f"{directory}: {type(wrapped).__name__} has no tokenizer.json; save one with "
            "transformers' save_pretrained"
        )
    starts_with_bos = wrapped.backend_tokenizer.encode("a").ids[:1] == [wrapped.bos_token_id]
    return Tokenizer(wrapped, bos_id=wrapped.bos_token_id if starts_with_bos else None)


def from_gguf(source: str, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file."""
    built = build_tokenizer(source, metadata)
    with _quiet_transformers():
        from transformers import PreTrainedTokenizerFast

        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=built.tokenizer, chat_template=built.chat_template, **built.special
        )
    bos_id = wrapped.bos_token_id if built.add_bos else None
    return Tokenizer(wrapped, bos_id=bos_id, stop_ids=built.stop_ids)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without the notice that PyTorch is missing, which nothing here needs."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
