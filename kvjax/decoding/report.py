"""The record of one row's run: usage, timing, bytes and settings, ready for JSON."""

import dataclasses
import importlib.metadata
import statistics
from typing import Any

import jax

from kvjax.cache.plan import Geometry, Plan
from kvjax.decoding.clock import Clock
from kvjax.decoding.requests import Options
from kvjax.decoding.row import Row
from kvjax.loading import LanguageModel
from kvjax.memory import memory_in_use


class BytesLog:
    """What one row held after every chunk, as counted on the device."""

    def __init__(self, geometry: Geometry):
        self._geometry = geometry
        self._heads = geometry.num_layers * geometry.num_kv_heads
        self.live: list[float] = []
        self.ratios: list[float] = []
        self.peak_bytes = 0
        self.logical = 0
        self.slots = 0
        self.live_bytes = 0
        self.full_bytes = 0

    def add(self, logical: int, slots: int, pages: int) -> None:
        """Note ``slots`` live and ``pages`` owned, over all layers and heads."""
        shape = self._geometry
        self.logical, self.slots = logical, slots
        self.live_bytes = pages * (shape.page_size * shape.slot_bytes + 4)  # and its table entry
        self.full_bytes = logical * shape.full_token_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.live.append(self.live_tokens)
        self.ratios.append(self.live_bytes / self.full_bytes)

    @property
    def live_tokens(self) -> float:
        """Tokens held, averaged over layers and KV heads."""
        return self.slots / self._heads

    def as_dict(self) -> dict[str, Any]:
        """Ratios are of bytes in owned pages to a bare bfloat16 cache of all logical tokens."""
        shape = self._geometry
        codes = self.slots * (shape.slot_bytes - 8)
        return {
            "logical_tokens": self.logical,
            "live_tokens": {
                "min": min(self.live),
                "mean": statistics.fmean(self.live),
                "max": max(self.live),
            },
            "bytes": {
                "codes": codes,
                "metadata": self.slots * 8,
                "total_live": self.live_bytes,
                "pool_allocated": shape.nbytes,
                "full_bf16": self.full_bytes,
            },
            "ratio": {
                "peak": self.peak_bytes / self.full_bytes,
                "time_avg": statistics.fmean(self.ratios),
                "end": self.ratios[-1],
            },
        }


def report(
    lm: LanguageModel,
    options: Options,
    planned: Plan,
    clock: Clock,
    log: BytesLog,
    row: Row,
) -> dict[str, Any]:
    """One row's record. Times are of the row's batch, from the call on; compilation is apart."""
    return {
        "usage": {
            "prompt": len(row.request.ids),
            "generated": len(row.tokens),
            "think": row.think_tokens,
        },
        "timing": clock.as_dict(),
        "kv": {"method": options.recipe.name, **log.as_dict()},
        "memory": memory_in_use(),
        "run": {
            "kvjax": importlib.metadata.version("kvjax"),
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
            "dtype": str(lm.dtype),
            "model": lm.source,
            "model_revision": lm.revision,
            "model_fingerprint": lm.fingerprint,
            "parameter_bytes": planned.parameter_bytes,
            **{
                field.name: getattr(options, field.name)
                for field in dataclasses.fields(options)
                if field.name not in ("recipe", "stop_ids")
            },
        },
    }
