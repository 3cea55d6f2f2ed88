"""What decoding tells its caller."""

import dataclasses
from typing import Any, Literal

import numpy as np

from kvjax.decoding.conversation import Conversation

FinishReason = Literal["stop", "length", "repetition", "cache_full", "interrupted", "error"]


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a batch has come.

    Attributes:
        generated: tokens chosen so far, all rows together.
        limit: tokens that may be chosen, all rows together.
        tokens_per_s: since the first token, compilation left out.
        live_tokens: tokens held by the cache, all rows together.
        logical_tokens: tokens read, all rows together.
        kv_bytes: bytes of the slots that hold them.
        full_bytes: bytes of as many tokens in a bare bfloat16 cache.
    """

    generated: int
    limit: int
    tokens_per_s: float
    live_tokens: int
    logical_tokens: int
    kv_bytes: int
    full_bytes: int


@dataclasses.dataclass(frozen=True)
class History:
    """What a row's cache held after every chunk of decoding.

    Attributes:
        lengths: tokens read by then, the prompt among them.
        live: tokens held a KV head, mean over layers.
        bytes: of the pages owned.
        full_token_bytes: of one token in a bare bfloat16 cache.
        prompt: tokens of the prompt.
        every: tokens of a segment, 0 where thoughts are not told apart.
        kinds: a letter for each segment of the answer, as far as known in the end.
        sizes: tokens that each of them held [chunks, segments]; a growing one's, all of it.
    """

    lengths: np.ndarray
    live: np.ndarray
    bytes: np.ndarray
    full_token_bytes: int
    prompt: int
    every: int = 0
    kinds: str = ""
    sizes: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """One prompt's answer.

    Attributes:
        text: the answer without special tokens, and without its reasoning.
        tokens: every token chosen, a stop token included.
        finish_reason: why it ended; ``error`` comes with ``error`` set.
        prompt_tokens: length of the prompt, chat template included.
        reasoning: what stood in the model's thinking block, None if it had none.
        report: usage, timing, bytes and the run's settings, ready for JSON.
        error: what went wrong with this row.
        history: what its cache held after every chunk.
        cache: what can be gone on from, where it was to be kept.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    reasoning: str | None = None
    report: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None
    history: History | None = dataclasses.field(default=None, repr=False, compare=False)
    cache: Conversation | None = dataclasses.field(default=None, repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: ``phase`` (``phase`` begins), ``text`` (a row grew) or ``done`` (a row ended).
        row: index of the prompt, None for a phase.
        sample: which of the prompt's samples it is.
        phase: ``prefill`` or ``decode``.
        text: whole characters that the row grew by; may be empty where ``tokens`` is not.
        tokens: tokens that the row grew by.
        progress: with ``text``, how far the row's batch has come.
        result: with ``done``, the row's answer.
    """

    kind: Literal["phase", "text", "done"]
    row: int | None = None
    phase: str = ""
    text: str = ""
    tokens: tuple[int, ...] = ()
    progress: Progress | None = None
    result: Result | None = None
    sample: int = 0
