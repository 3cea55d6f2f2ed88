"""What decoding tells its caller."""

import dataclasses
from typing import Any, Literal

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
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    reasoning: str | None = None
    report: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: ``phase`` (``phase`` begins), ``text`` (a row grew) or ``done`` (a row ended).
        row: index of the prompt, None for a phase.
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
