"""What a comparison has found."""

import dataclasses
import math
from typing import Any

import numpy as np

from kvjax.report.units import size


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far a compressed run is from the uncompressed one, on given tokens.

    Means are over all rows and scored positions: those of the tokens after the prompt.

    Attributes:
        method: the recipe's name; ``budget`` and ``codec`` are the recipe's too.
        tokens: of each row, the prompt included.
        prompt_tokens: the first ones, read as a prompt and not scored.
        kl_mean: Kullback-Leibler divergence of the compressed run's distribution from the
            uncompressed one's, KL(full || compressed), in nats.
        kl_p99: what 99 of 100 positions stay below.
        top1_agreement: share of positions at which both find the same token likeliest.
        first_divergence: for each row, tokens after the prompt on which both agree before the first
            on which they do not; None where there is no such token.
        nll: mean negative log likelihood of the given tokens in the compressed run, in nats.
        nll_full: the same without compression.
        live_tokens: tokens held a KV head, mean over layers: min, mean, max, end. Mean over rows.
        bytes: of a row, in pages that it owns: peak, time_avg and end, and ``full_bf16``, a bare
            bfloat16 cache at the end. Mean over rows.
        ratio: bytes over those of a bare bfloat16 cache of as many tokens as had been read by then
            (peak: over the one at the end). Mean over rows.
        crowded: tokens (of one layer and KV head each) that found no slot, which none should.
        per_layer: relative error (L2) of every layer's attention output, if asked for. A layer's
            error includes what the layers before it have passed on.
        kl: the divergence of every row and position.
        nlls: the compressed run's negative log likelihood of every row and position.
    """

    method: str
    budget: int | float | None
    codec: str | None
    tokens: int
    prompt_tokens: int
    kl_mean: float
    kl_p99: float
    top1_agreement: float
    first_divergence: tuple[int | None, ...]
    nll: float
    nll_full: float
    live_tokens: dict[str, float]
    bytes: dict[str, float]
    ratio: dict[str, float]
    crowded: int
    per_layer: tuple[float, ...] | None = None
    kl: np.ndarray | None = dataclasses.field(default=None, repr=False, compare=False)
    nlls: np.ndarray | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)

    @property
    def perplexity_full(self) -> float:
        return math.exp(self.nll_full)

    def as_dict(self) -> dict[str, Any]:
        """All but the single positions, ready for JSON."""
        found = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("kl", "nlls")
        }
        return found | {
            "rows": len(self.first_divergence),
            "first_divergence": list(self.first_divergence),
            "perplexity": self.perplexity,
            "perplexity_full": self.perplexity_full,
            "per_layer": None if self.per_layer is None else list(self.per_layer),
        }

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each line of a report."""
        method = [self.method]
        if self.budget is not None:
            method.append(f"budget {self.budget}")
        if self.codec is not None:
            method.append(self.codec)
        count = len(self.first_divergence)
        apart = [at for at in self.first_divergence if at is not None]
        first = f"after {min(apart):,} tokens, in {len(apart)} of {count} rows" if apart else "none"
        lines = [
            ("method", ", ".join(method)),
            (
                "tokens",
                f"{count} rows of {self.tokens:,}, the first {self.prompt_tokens:,} a prompt",
            ),
            ("KL", f"{self.kl_mean:.3g} nats, 99 % below {self.kl_p99:.3g}"),
            ("same top token", f"{self.top1_agreement:.2%}"),
            ("first divergence", first),
            ("perplexity", f"{self.perplexity:.4g} (full {self.perplexity_full:.4g})"),
            (
                "live tokens",
                f"{self.live_tokens['mean']:,.0f}, at the end {self.live_tokens['end']:,.0f}",
            ),
            (
                "bytes a row",
                f"{size(round(self.bytes['peak']))} at the peak, {self.ratio['peak']:.3f} of bf16 "
                f"(time average {self.ratio['time_avg']:.3f}, end {self.ratio['end']:.3f})",
            ),
        ]
        if self.crowded:
            lines.append(("without a slot", f"{self.crowded:,}"))
        for layer, error in enumerate(self.per_layer or ()):
            lines.append((f"layer {layer}", f"{error:.4g}"))
        return lines
