"""The record of one row's run: usage, timing, bytes and settings, ready for JSON."""

import collections
import dataclasses
import importlib.metadata
import statistics
from typing import Any

import jax
import numpy as np

from kvjax.cache import Geometry, Plan
from kvjax.decoding.clock import Clock
from kvjax.decoding.requests import Options
from kvjax.decoding.row import Row
from kvjax.loading import LanguageModel
from kvjax.memory import memory_in_use
from kvjax.recipes import as_dict


class BytesLog:
    """What one row held after every chunk, as counted on the device."""

    def __init__(self, geometry: Geometry):
        self._geometry = geometry
        classes = max(len(layer.classes) for layer in geometry.layers)
        size = (len(geometry.layers), classes)
        self._page_bytes = np.zeros(size, np.int64)
        for index, held in enumerate(geometry.page_bytes):
            self._page_bytes[index, : len(held)] = held
        # What a row has whatever it holds: its last queries.
        self._fixed = geometry.query_bytes // geometry.rows
        self._slots = np.zeros(size, np.int64)
        self.live: list[float] = []
        self.ratios: list[float] = []
        self.peak_bytes = 0
        self.logical = 0
        self.crowded = 0
        self.live_bytes = 0
        self.full_bytes = 0

    def add(self, logical: int, slots: np.ndarray, pages: np.ndarray) -> None:
        """Note the slots that are live and the pages that are owned, for every layer and class."""
        self.logical, self._slots = logical, slots
        self.live_bytes = int((pages * self._page_bytes).sum()) + self._fixed
        self.full_bytes = logical * self._geometry.full_token_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.live.append(self.live_tokens)
        self.ratios.append(self.live_bytes / self.full_bytes)

    @property
    def live_tokens(self) -> float:
        """Tokens held, averaged over layers and KV heads."""
        heads = len(self._geometry.layers) * self._geometry.num_kv_heads
        return int(self._slots.sum()) / heads

    def as_dict(self) -> dict[str, Any]:
        """Ratios are of bytes in owned pages to a bare bfloat16 cache of all logical tokens."""
        shape = self._geometry
        heads = len(shape.layers) * shape.num_kv_heads
        held = collections.Counter()
        recent = 0.0
        for layer, slots in zip(shape.layers, self._slots, strict=True):
            for i, part in enumerate(layer.classes):
                each = shape.slot_bytes(part)
                buffer = i == 0 and len(layer.classes) > 1
                recent += int(slots[i]) * each["codes"] * buffer
                for name, count in each.items():
                    held[name] += int(slots[i]) * count * (not buffer or name != "codes")
        return {
            "logical_tokens": self.logical,
            "live_tokens": {
                "min": min(self.live),
                "mean": statistics.fmean(self.live),
                "max": max(self.live),
                "end": self.live[-1],
            },
            "evictions": round(self.logical * heads - int(self._slots.sum())),
            "crowded": self.crowded,
            "bytes": {
                "codes": round(held["codes"]),
                "scales": round(held["scales"]),
                "metadata": round(held["metadata"]),
                "fp_buffer": round(recent) + self._fixed,
                "total_live": self.live_bytes,
                "pool_allocated": shape.nbytes,
                "full_bf16": self.full_bytes,
            },
            "ratio": {
                "peak": self.peak_bytes / self.full_bytes,
                "time_avg": statistics.fmean(self.ratios),
                "end": self.ratios[-1],
            },
            "per_layer": [
                {
                    "codec": layer.classes[-1].codec.name,
                    "live_tokens": int(slots.sum()) / shape.num_kv_heads,
                }
                for layer, slots in zip(shape.layers, self._slots, strict=True)
            ],
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
    settings = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    del settings["recipe"]  # which has a form of its own
    return {
        "usage": {
            "prompt": len(row.request.ids),
            "generated": len(row.tokens),
            "think": row.think_tokens,
        },
        "timing": clock.as_dict(),
        "kv": {"method": options.recipe.name, "budget": options.recipe.budget, **log.as_dict()},
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
            "recipe": as_dict(options.recipe),
            **{name: list(v) if isinstance(v, tuple) else v for name, v in settings.items()},
        },
    }
