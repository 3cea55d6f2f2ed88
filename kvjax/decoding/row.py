"""The host's side of one row: its tokens, its text and why it ended."""

import itertools
from collections.abc import Sequence

from kvjax.decoding.events import FinishReason
from kvjax.decoding.repetition import LoopWatch
from kvjax.decoding.requests import Options, Request
from kvjax.loading import LanguageModel

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class Row:
    """Collects what the device decodes for one request; sees stops that the device does not.

    Attributes:
        tokens: every token chosen, a stop token included.
        pieces: the text so far, in whole characters; it ends before a stop text.
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
        answered = request.past.answered if request.goes_on else 0
        given = request.ids[: len(request.ids) - answered]
        self._thinking = bool(lm.tokenizer) and lm.tokenizer.thinking_open(given)
        self._stop_ids = options.stop_ids
        self._watch = LoopWatch() if options.repetition_stop else None
        self._detokenizer = lm.tokenizer.detokenizer() if lm.tokenizer else None
        self._stop_texts: tuple[str, ...] = ()
        self._unsent = ""  # text that may be the beginning of a stop text, and what just came
        self._go_on(request.ids[len(given) :])
        self._stop_texts = options.stop_texts

    def _go_on(self, answered: tuple[int, ...]) -> None:
        """Know what the answer was so far, which is none of this row's own text."""
        if self._watch is not None:
            self._watch, _ = self._watch.push(answered)
        for token in answered:
            if token not in self._stop_ids:
                self._detokenise(token)
        self.pieces, self._unsent, self.think_tokens, self._thought_from = [], "", 0, 0

    @property
    def phase(self) -> str:
        """ "think" while a thinking block is open, else "answer"."""
        return "think" if self._thinking else "answer"

    def push(self, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Take tokens until the row ends; returns what they added: text and tokens."""
        start, looping = len(self.tokens), None
        if self._watch is not None:
            self._watch, looping = self._watch.push(tokens)
        for number, token in enumerate(tokens):
            if self.finish:
                break
            self.tokens.append(token)
            self.finish = self._reason(token, number == looping)
            if token not in self._stop_ids:
                self._detokenise(token)
        if self.finish:
            self._flush()
        return self._send(), tuple(self.tokens[start:])

    def end(self, reason: FinishReason, error: str | None = None) -> str:
        """End the row for a reason from outside; returns the text that was held back."""
        self._flush()
        self.finish, self.error = reason, error
        return self._send()

    def _reason(self, token: int, looping: bool) -> FinishReason | None:
        if token in self._stop_ids:
            return "stop"
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

    def _detokenise(self, token: int) -> None:
        if self._detokenizer is not None:
            self._add(self._detokenizer.push([token]))
            self._count_thought()

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

    def _flush(self) -> None:
        if self._detokenizer is not None:
            self._add(self._detokenizer.flush())

    def _add(self, piece: str) -> None:
        """Append to the text, and end the row where a stop text is now complete."""
        self.pieces.append(piece)
        self._unsent += piece
        # A stop text that is complete now began in what is unsent: else it would have been held.
        ends = [(self._unsent.find(text) + len(text), text) for text in self._stop_texts]
        found = [(end, -len(text)) for end, text in ends if end >= len(text)]
        if not found:
            return
        end, length = min(found)
        surplus = len(self._unsent) - (end + length)
        self._unsent = self._unsent[: end + length]
        for i in reversed(range(len(self.pieces))):
            self.pieces[i], surplus = _shortened(self.pieces[i], surplus)
            if not surplus:
                break
        self.finish = "stop"
        self._stop_texts = ()
        if self._detokenizer is not None:
            self._detokenizer.flush()  # what is behind the stop text is no text of this row

    def _send(self) -> str:
        """The text that has not been sent and can no longer become a stop text."""
        held = 0 if self.finish else _beginning(self._unsent, self._stop_texts)
        at = len(self._unsent) - held
        text, self._unsent = self._unsent[:at], self._unsent[at:]
        return text


def _beginning(text: str, stops: tuple[str, ...]) -> int:
    """Characters at the end of a text that begin one of the stops, at most."""
    longest = max(map(len, stops), default=1) - 1
    return next(
        (
            count
            for count in range(min(longest, len(text)), 0, -1)
            if any(stop.startswith(text[-count:]) for stop in stops if len(stop) > count)
        ),
        0,
    )


def _shortened(text: str, surplus: int) -> tuple[str, int]:
    """The text without so many of its last characters, and how many there are left to take."""
    kept = text[: max(0, len(text) - surplus)]
    return kept, surplus - (len(text) - len(kept))
