"""The host's side of one row: its tokens, its text and why it ended."""

import itertools
from collections.abc import Iterable

from kvjax.decoding.events import FinishReason
from kvjax.decoding.repetition import LoopWatch
from kvjax.decoding.requests import Options, Request
from kvjax.loading import LanguageModel

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class Row:
    """Collects what the device decodes for one request; sees stops that the device does not.

    Attributes:
        tokens: every token chosen, a stop token included.
        pieces: the text so far, in whole characters.
        finish: why the row ended, None while it runs.
        error: what went wrong, where ``finish`` is ``error``.
        think_tokens: tokens of the thinking block, its marks included.
    """

    def __init__(self, lm: LanguageModel, request: Request, options: Options):
        self.request = request
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self.think_tokens = 0
        self._thought_from = 0
        self._thinking = bool(lm.tokenizer) and lm.tokenizer.thinking_open(request.ids)
        self._stop_ids = options.stop_ids
        self._watch = LoopWatch() if options.repetition_stop else None
        self._detokenizer = lm.tokenizer.detokenizer() if lm.tokenizer else None

    def push(self, tokens: Iterable[int]) -> tuple[str, tuple[int, ...]]:
        """Take tokens until the row ends; returns what they added: text and tokens."""
        start = len(self.tokens)
        for token in tokens:
            if self.finish:
                break
            self.tokens.append(token)
            self.finish = self._reason(token)
        new = self.tokens[start:]
        text = self._detokenise(new[:-1] if self.finish == "stop" and new else new)
        return text, tuple(new)

    def end(self, reason: FinishReason, error: str | None = None) -> str:
        """End the row for a reason from outside; returns the text that was held back."""
        self.finish, self.error = reason, error
        return self._flush()

    def _reason(self, token: int) -> FinishReason | None:
        if token in self._stop_ids:
            return "stop"
        if self._watch is not None:
            self._watch, looping = self._watch.push(token)
            if looping:
                return "repetition"
        if len(self.tokens) >= self.request.max_new:
            return "cache_full" if self.request.truncated else "length"
        return None

    def split(self) -> tuple[str, str | None]:
        """The answer, and the reasoning that came before it."""
        text = "".join(self.pieces)
        opened = text.lstrip().startswith(THINK_OPEN)
        if not (opened or self._thinking or self.think_tokens):
            return text, None
        reasoning, _, answer = text.partition(THINK_CLOSE)
        return answer.lstrip(), reasoning.strip().removeprefix(THINK_OPEN).strip()

    def _detokenise(self, tokens: list[int]) -> str:
        if self._detokenizer is None:
            return ""
        start = len(self.pieces)
        for token in tokens:
            self.pieces.append(self._detokenizer.push([token]))
            self._count_thought()
        if self.finish:
            self._flush()
        return "".join(self.pieces[start:])

    def _count_thought(self) -> None:
        """Count the token just taken if it belongs to a thinking block."""
        if not (self._thinking or self.think_tokens):
            beginning = "".join(self.pieces[: len(THINK_OPEN) + 2]).lstrip()
            self._thinking = beginning.startswith(THINK_OPEN)
            # Blank tokens before the mark are no thought; the mark's own first tokens are.
            blank = itertools.takewhile(lambda piece: not piece.strip(), self.pieces)
            self._thought_from = len(list(blank))
        if self._thinking:
            self.think_tokens = len(self.pieces) - self._thought_from
            self._thinking = THINK_CLOSE not in "".join(self.pieces[-len(THINK_CLOSE) :])

    def _flush(self) -> str:
        if self._detokenizer is None:
            return ""
        self.pieces.append(self._detokenizer.flush())
        return self.pieces[-1]
