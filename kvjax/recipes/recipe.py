"""Named methods: what of a token is stored, for how long, and in which numbers."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.codecs import KVCodec, kv_codec
from kvjax.compress import Selector
from kvjax.compress.selectors import Streaming
from kvjax.dynakv.projector import Projector
from kvjax.errors import UsageError
from kvjax.matching import AttentionMatching
from kvjax.models.decoder import KeyStage
from kvjax.thoughts import Retention, Segmenter

PHASES = ("prompt", "think", "answer")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a cache is kept: which parts work on it, and when.

    Attributes:
        name: what ``--method`` calls it.
        projector: what tokens are projected by, so that latents are kept of them; None keeps keys
            and values. ``codec`` is then the latents', which have neither values nor rotation.
        page_size: slots a page, a power of two.
        codec: the numbers that stored tokens are kept in, a name of ``kvjax.codecs.kv_codec``;
            None keeps every token as it was made, where it was written.
        prompt_codec: the same for the prompt's tokens, if it is another.
        thought_codecs: the same for the answer's tokens by the kind of their thought: reasoning,
            execution, transition. Needs a ``segmenter``.
        layer_codecs: pairs of a layer's index (from the end if negative) or "*", and a codec. The
            first that names a layer wins; ``codec`` is for the layers that none names.
        selector: what decides which tokens stay; None keeps all.
        segmenter: what finds the kind of thought that a segment of the answer is.
        retention: what stays of the answer, segment by segment; a selector is then for the prompt
            alone, while it is read.
        compactor: what becomes of the mass of tokens that are evicted: it goes to those that stay;
            None: it is dropped.
        budget: tokens that a KV head may hold after a selection, recent ones included; or, if it is
            a float of at most 1, their share of the tokens that the row has read. With a
            ``retention``: tokens of the answer's complete segments (and the share is the answer's);
            the growing one, the recent window and the prompt come on top.
        head_shares: for every layer and KV head its share of the budget, if they are not alike; a
            ``budget`` in tokens is then what a head has on average.
        share_of: what a budget that is a share is a share of: the tokens "read" so far, those
            "held" when the selection comes, or the "longest" that a row may get.
        prompt_budget: with a ``retention``, tokens of the prompt that its selector keeps.
        sinks: how many of the first tokens stay in any case.
        recent: how many of the last tokens stay in any case.
        protect_prompt: the whole prompt stays.
        every: decode steps between two selections; 0 selects only while the prompt is read.
        once: while decoding, the first selection is the only one.
        compress: in which phases tokens are selected at all.
        skip_layers: layers (from the end if negative) whose tokens all stay.
        positions: "original", or "contiguous": queries see the sinks right before the recent
            tokens, as if nothing had been between them (for ``streaming``).
        window: the last tokens that are kept as they were made.
        tick: decode steps after which the oldest of them are coded and stored.
    """

    name: str
    page_size: int = 64
    projector: Projector | None = None
    codec: str | None = "bf16"
    prompt_codec: str | None = None
    thought_codecs: tuple[str, str, str] | None = None
    layer_codecs: tuple[tuple[int | str, str], ...] = ()
    selector: Selector | None = None
    segmenter: Segmenter | None = None
    retention: Retention | None = None
    compactor: AttentionMatching | None = None
    budget: int | float | None = None
    head_shares: tuple[tuple[float, ...], ...] | None = None
    share_of: Literal["read", "held", "longest"] = "read"
    prompt_budget: int | float | None = None
    sinks: int = 4
    recent: int = 32
    protect_prompt: bool = False
    every: int = 16
    once: bool = False
    compress: tuple[Literal["prompt", "think", "answer"], ...] = PHASES
    skip_layers: tuple[int, ...] = ()
    positions: Literal["original", "contiguous"] = "original"
    window: int = 16
    tick: int = 16

    def __post_init__(self):
        """Refuse what cannot work.

        Raises:
            UsageError: naming the field, its value and what would do.
        """
        size = self.page_size
        if not isinstance(size, int) or size < 1 or size & (size - 1):
            raise UsageError(f"page_size must be a power of two, got {size!r}; 64 is the default")
        for name, least in (("sinks", 0), ("recent", 0), ("every", 0), ("window", 1), ("tick", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(
                    f"{name} must be a whole number of at least {least}, got {value!r}"
                )
        if self.keeps_all:
            return
        own = (self.codec, self.prompt_codec, *(self.thought_codecs or ()))
        given = (*own, *self.codecs_of_layers)
        codecs = [kv_codec(spec) for spec in given if spec is not None]
        unknown = set(self.compress) - set(PHASES)
        if unknown:
            raise UsageError(f"compress takes {', '.join(PHASES)}, got {', '.join(unknown)}")
        self._check_thoughts()
        self._check_matching(codecs)
        self._check_latents(codecs)
        self._check_positions()
        if self.retention is not None or self.selector is None:
            return
        if self.every % self.tick:
            raise UsageError(
                f"every {self.every} must be a multiple of the {self.tick} steps after which "
                f"tokens are stored: pass {math.ceil(self.every / self.tick) * self.tick}"
            )
        for codec in codecs:
            if codec.group > 1:
                raise UsageError(
                    f"codec {codec.name} shares scales among tokens, so none can be evicted alone: "
                    f"use it with method uniform, or another codec with {self.name}"
                )
        self._check_budget("budget", self.floor)

    def _check_thoughts(self) -> None:
        if self.segmenter is None:
            if self.retention or self.thought_codecs:
                raise UsageError("segmenter must be given: without one there are no thoughts")
            return
        every = self.segmenter.every
        if every % self.tick or every < self.window + self.tick:
            raise UsageError(
                f"segment_tokens {every} must be a multiple of the {self.tick} steps after which "
                f"tokens are stored, and at least {self.window + self.tick}"
            )
        # A layer with a sliding window has all its tokens, the prompt's too, in the one codec.
        of_prompt = (("prompt_codec", self.prompt_codec), ("codec", self.codec))
        of_layers = (("layer_codecs", spec) for _, spec in self.layer_codecs)
        for name, spec in (*of_prompt, *of_layers):
            if spec is not None and kv_codec(spec).group > 1:
                raise UsageError(
                    f"{name} {spec} shares scales among tokens, and a prompt need not fill its "
                    "last group: take int8, int4, ..."
                )
        for spec in self.thought_codecs or ():
            if every % (group := kv_codec(spec).group):
                raise UsageError(
                    f"segment_tokens {every} must be a multiple of the {group} tokens that share a "
                    f"scale in codec {spec}"
                )
        if self.retention is None:
            return
        if (self.selector is None) != (self.prompt_budget is None):
            raise UsageError("prompt_budget and a selector for the prompt need each other")
        if self.selector is not None:
            self._check_budget("prompt_budget", self.floor)
        self._check_budget("budget", 1)

    def _check_latents(self, codecs: list[KVCodec]) -> None:
        if self.projector is None:
            return
        if self.prompt_codec is not None:
            raise UsageError("prompt_codec has no effect on latents, which have one codec a layer")
        for codec in codecs:
            if codec.k.fmt != codec.v.fmt or (not codec.k.uniform and codec.k.fmt != "float"):
                raise UsageError(
                    f"codec {codec.name} is not for latents, which have no values and one scale a "
                    "slot: take bf16, int8, fp8, int4 or int2"
                )
        if self.compactor is not None:
            raise UsageError("compactor changes values, which there are none of among latents")
        if self.retention is not None and not self.retention.forget:
            raise UsageError("forget has no effect on latents: an evicted one is gone")
        if self.thought_codecs is not None:
            raise UsageError(
                "thought_codecs have no effect on latents, which have one codec a layer: give codec"
            )
        for name, given, plain in (
            ("once", self.once, False),
            ("head_shares", self.head_shares, None),
            ("positions", self.positions, "original"),
        ):
            if given != plain:
                raise UsageError(f"{name} has no effect on latents, which all heads share")
        if self.needs_mass or self.needs_segments:
            raise UsageError(
                f"selector {type(self.selector).__name__} needs more than keys and queries, which "
                "is all that is known of latents: take snapkv, rkv, streaming or random"
            )

    def _check_positions(self) -> None:
        if self.positions not in ("original", "contiguous"):
            raise UsageError(f"positions must be original or contiguous, got {self.positions!r}")
        if self.positions == "original":
            return
        streams = isinstance(self.selector, Streaming) and self.retention is None
        if not streams or self.head_shares is not None:
            raise UsageError(
                "positions contiguous is for heads that all keep the first and the last tokens: "
                "take selector streaming, without head_shares, or positions original"
            )

    def _check_matching(self, codecs: list[KVCodec]) -> None:
        if self.share_of not in ("read", "held", "longest"):
            raise UsageError(f"share_of must be read, held or longest, got {self.share_of!r}")
        if self.retention is not None and self.share_of != "read":
            raise UsageError(f"share_of {self.share_of} is for selectors, not for a retention")
        if self.head_shares is not None:
            counted = isinstance(self.budget, int) or self.share_of == "longest"
            if self.selector is None or self.retention is not None or not counted:
                raise UsageError("head_shares need a selector, and a budget in tokens")
        if self.compactor is None:
            return
        if self.repeats and (self.retention is not None or not self.every):
            raise UsageError(
                "compactor cannot let the model repeat its context with method thinkv, "
                "or while a prompt is read"
            )
        if self.selector is None and self.retention is None:
            raise UsageError("compactor has nothing to do where nothing is evicted")
        if self.positions == "contiguous":
            raise UsageError("compactor needs tokens at their original positions")
        if self.retention is not None and not self.retention.forget:
            raise UsageError("compactor and evicted tokens that are still attended exclude another")
        for codec in codecs:
            if codec.group > 1:
                raise UsageError(
                    f"compactor changes single values, and codec {codec.name} shares scales among "
                    "tokens: take int8, int4, ..."
                )

    def _check_budget(self, name: str, least: int) -> None:
        budget = getattr(self, name)
        if isinstance(budget, float) and 0 < budget <= 1:
            return
        if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
            raise UsageError(
                f"{name} must be a number of tokens or a share between 0 and 1, got {budget!r}"
            )
        if budget < least:
            raise UsageError(
                f"{name} {budget} is below the {self.sinks} first and the "
                f"{max(self.recent, self.window)} last tokens that stay, and one more: pass {least}"
            )

    @property
    def keeps_all(self) -> bool:
        """Whether every token stays where it was written, as it was made."""
        return self.codec is None

    @property
    def codecs_of_layers(self) -> tuple[str, ...]:
        """Codecs of single layers."""
        return tuple(spec for _, spec in self.layer_codecs)

    @property
    def key_stage(self) -> KeyStage:
        """The stage at which the cache takes keys."""
        return "rotated" if self.projector is None else "normed"

    @property
    def floor(self) -> int:
        """The fewest tokens that can be kept."""
        return self.sinks + max(self.recent, self.window) + 1

    @property
    def needs_mass(self) -> bool:
        return self.selector is not None and self.selector.needs_mass

    @property
    def needs_queries(self) -> int:
        if self.repeats:
            return 0
        return max(
            0 if self.selector is None else self.selector.needs_queries,
            0 if self.retention is None else self.retention.needs_queries,
            0 if self.compactor is None else self.compactor.needs_queries,
        )

    @property
    def repeats(self) -> bool:
        """Whether the model repeats its context before a selection, whose queries are asked."""
        return self.compactor is not None and self.compactor.reference == "repeat"

    @property
    def needs_text(self) -> bool:
        """Whether the tokens that have been read are looked at again."""
        return self.needs_segments or self.repeats

    @property
    def needs_segments(self) -> bool:
        """Whether the selector looks for paragraphs."""
        return getattr(self.selector, "needs_segments", False)

    @property
    def spares_prompt(self) -> bool:
        """Whether the prompt's tokens all stay."""
        of_answer = self.retention is not None and self.selector is None
        return self.protect_prompt or of_answer or "prompt" not in self.compress

    @property
    def selected(self) -> int | float | None:
        """The selector's budget."""
        return self.budget if self.retention is None else self.prompt_budget

    def room(
        self, length: Int[Array, " B"], held: Int[Array, "B Hkv"]
    ) -> Int[Array, " B"] | Int[Array, "B Hkv"]:
        """Tokens that each row, or KV head, may hold after a selection.

        Args:
            length: tokens read.
            held: tokens that the heads hold before it.
        """
        tokens = held if self.share_of == "held" else length
        return self._share(self.selected, tokens, self.floor)

    def holds(self, tokens: int) -> bool:
        """Whether a row of so many tokens keeps them all, whatever they are."""
        alike = self.head_shares is None
        return alike and isinstance(self.selected, int) and tokens <= self.selected

    def for_longest(self, tokens: int) -> "Recipe":
        """The recipe for rows of at most so many tokens: shares of the longest are numbers."""
        if self.share_of != "longest" or not isinstance(self.budget, float):
            return self
        budget = max(math.ceil(self.budget * tokens), self.floor)
        return dataclasses.replace(self, budget=budget, share_of="read")

    def retained(self, answered: Int[Array, " B"]) -> Int[Array, " B"]:
        """Tokens that a row's complete segments may hold, once so many of its answer are read."""
        return self._share(self.budget, answered, 1)

    def most(self, tokens: int) -> int:
        """``room`` of a row of so many tokens, as a number."""
        if self.selector is None or self.selected is None:
            return tokens
        return min(self._whole(self.selected, tokens, self.floor), tokens)

    def most_retained(self, answered: int) -> int:
        """``retained`` of a row with so many tokens in its answer, as a number."""
        return min(self._whole(self.budget, answered, 1), answered)

    def _share(self, budget, tokens: Int[Array, "..."], least: int) -> Int[Array, "..."]:
        if isinstance(budget, int):
            return jnp.full(tokens.shape, budget, jnp.int32)
        share = jnp.ceil(jnp.float32(budget) * tokens.astype(jnp.float32))
        return jnp.maximum(share.astype(jnp.int32), least)

    def _whole(self, budget, tokens: int, least: int) -> int:
        return budget if isinstance(budget, int) else max(math.ceil(budget * tokens) + 1, least)
