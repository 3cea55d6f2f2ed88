"""The record of one row's run: usage, timing, bytes and settings, ready for JSON."""

import collections
import dataclasses
import statistics
from typing import Any

import jax
import numpy as np

from kvjax import __version__
from kvjax.cache import Geometry, LayerGeometry, Plan
from kvjax.decoding.clock import Lap
from kvjax.decoding.events import History
from kvjax.decoding.requests import Options, Request
from kvjax.decoding.row import Row
from kvjax.loading import LanguageModel
from kvjax.memory import memory_in_use
from kvjax.recipes import Recipe, as_dict
from kvjax.sharding import shards
from kvjax.thoughts import KINDS, Thoughts

MOST_TOKENS = 4096
"""Entries of ``kv.per_token`` at most."""


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
        self._fixed = geometry.devices * geometry.query_bytes // geometry.rows
        self._slots = np.zeros(size, np.int64)
        self._most = np.zeros(size, np.int64)
        self._had = 0, 0  # at the first look: tokens read, and slots live
        self._latents: np.ndarray | None = None
        self._blocks: np.ndarray | None = None
        self.thoughts: list[Thoughts] = []
        self.bytes: list[int] = []
        self.lengths: list[int] = []
        self.live: list[float] = []
        self.ratios: list[float] = []
        self.peak_bytes = 0
        self.logical = 0
        self.crowded = 0
        self.live_bytes = 0
        self.full_bytes = 0

    def add(
        self,
        row: int,
        *,
        length: np.ndarray,
        slots: np.ndarray,
        pages: np.ndarray,
        crowded: np.ndarray,
        thoughts: Thoughts | None = None,
        latents: np.ndarray | None = None,
        blocks: np.ndarray | None = None,
    ) -> None:
        """Note the slots that are live and the pages that are owned, for every layer and class.

        Args:
            row: which one of the others, which are numpy arrays of all rows.
            length: tokens read.
            crowded: tokens that have found no slot.
            thoughts: where they are told apart.
            latents: of ``kvjax.cache.held_latents``.
            blocks: of ``kvjax.cache.held_blocks``.
        """
        logical, self.crowded = int(length[row]), int(crowded[row])
        slots, pages, thoughts, latents, blocks = jax.tree.map(
            lambda leaf: leaf[row], (slots, pages, thoughts, latents, blocks)
        )
        if not self.lengths:
            self._had = logical, int(slots.sum())
        self.logical, self._slots, self._latents, self._blocks = logical, slots, latents, blocks
        self._most = np.maximum(self._most, slots)
        if thoughts is not None:
            self.thoughts.append(thoughts)
        self.live_bytes = int((pages * self._page_bytes).sum()) + self._fixed
        self.full_bytes = logical * self._geometry.full_token_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.live.append(self.live_tokens)
        self.bytes.append(self.live_bytes)
        self.lengths.append(logical)
        self.ratios.append(self.live_bytes / self.full_bytes)

    def history(self, recipe: Recipe, prompt: int) -> History:
        """All of it, for a drawing."""
        found = History(
            np.array(self.lengths),
            np.array(self.live),
            np.array(self.bytes),
            self._geometry.full_token_bytes,
            prompt,
        )
        if not self.thoughts:
            return found
        every = recipe.segmenter.every
        start = prompt + every * np.arange(len(self.thoughts[0].kind))
        sizes = np.clip(found.lengths[:, None] - start, 0, every)
        if recipe.retention is not None:
            left = np.array(recipe.retention.sizes(every))
            levels = np.stack([thoughts.level for thoughts in self.thoughts])
            # What was complete, and worked on, before the chunk's first token.
            worked = prompt + (found.lengths - prompt - 1) // recipe.tick * recipe.tick
            complete = worked[:, None] - recipe.window >= start + every
            sizes = np.where(complete, left[levels], sizes)
        kinds = "".join(KINDS[kind] for kind in self.thoughts[-1].kind if kind >= 0)
        return dataclasses.replace(found, every=every, kinds=kinds, sizes=sizes[:, : len(kinds)])

    @property
    def live_tokens(self) -> float:
        """Tokens held, averaged over layers and KV heads."""
        if self._latents is not None:
            return float(self._latents[:, 0].mean())
        heads = len(self._geometry.layers) * self._geometry.all_kv_heads
        return int(self._slots.sum()) / heads

    def as_dict(self) -> dict[str, Any]:
        """Ratios are of bytes in owned pages to a bare bfloat16 cache of all logical tokens."""
        shape = self._geometry
        heads = len(shape.layers) * shape.all_kv_heads
        held = collections.Counter()
        recent, coded = 0.0, 0
        for layer, slots in zip(shape.layers, self._slots, strict=True):
            for i, part in enumerate(layer.classes):
                each = shape.slot_bytes(part)
                buffer = i == 0 and len(layer.classes) > 1
                recent += int(slots[i]) * each["codes"] * buffer
                coded += int(slots[i]) * (not buffer)
                for name, count in each.items():
                    held[name] += int(slots[i]) * count * (not buffer or name != "codes")
        numbers = coded * 2 * shape.head_dim
        if self._latents is not None:  # slots are not tokens, and hold parts of them
            block = [layer.classes[1].latent for layer in shape.layers]
            numbers = int((self._slots[:, 1] * block).sum())
        return {
            "logical_tokens": self.logical,
            "live_tokens": {
                "min": min(self.live),
                "mean": statistics.fmean(self.live),
                "max": max(self.live),
                "end": self.live[-1],
            },
            "evictions": round((self.logical - self.live_tokens) * heads),
            "crowded": self.crowded,
            "slots_reused": self._reused(heads),
            "bits": 8 * (held["codes"] + held["scales"]) / max(numbers, 1),
            "bytes": {
                "codes": round(held["codes"]),
                "scales": round(held["scales"]),
                "metadata": round(held["metadata"]),
                "fp_buffer": round(recent) + self._fixed,
                "total_live": self.live_bytes,
                "pool_allocated": shape.devices * shape.nbytes,
                "full_bf16": self.full_bytes,
            },
            "ratio": {
                "peak": self.peak_bytes / self.full_bytes,
                "time_avg": statistics.fmean(self.ratios),
                "end": self.ratios[-1],
            },
            "per_layer": [
                {"codec": "/".join(_coded(layer)), **held}
                for layer, held in zip(shape.layers, self._per_layer(), strict=True)
            ],
            **self._rates(),
            **self._per_token(),
        }

    def _reused(self, heads: int) -> int:
        """Tokens stored beyond the most that were ever held at once.

        Of a prompt those that were held once it was read: the others may never have had a slot.
        """
        if self._slots.shape[1] == 1 or self._latents is not None:
            return 0
        logical, held = self._had
        stored = held + (self.logical - logical) * heads - int(self._slots[:, 0].sum())
        return stored - int(self._most[:, 1:].sum())

    def _per_layer(self) -> list[dict[str, Any]]:
        """Tokens that each layer holds, and the shares of their components, if it is latents."""
        shape = self._geometry
        if self._latents is None:
            held = self._slots.sum(1)
            return [{"live_tokens": int(slots) / shape.all_kv_heads} for slots in held]
        shares = self._latents[:, 2:] / np.maximum(self._latents[:, 1:2] * shape.width, 1)
        return [
            {"live_tokens": int(tokens), "rate_keys": float(keys), "rate_values": float(values)}
            for tokens, (keys, values) in zip(self._latents[:, 0], shares, strict=True)
        ]

    def _rates(self) -> dict[str, Any]:
        """Shares of components that are stored of tokens no longer recent, whole blocks counted."""
        if self._latents is None:
            return {}
        layers = self._per_layer()
        keys, values = (
            statistics.fmean(layer[name] for layer in layers)
            for name in ("rate_keys", "rate_values")
        )
        rates = {"hard": (keys + values) / 2, "keys": keys, "values": values}
        return {"rates": rates | {"blocks": self._geometry.projector.blocks}}

    def _per_token(self) -> dict[str, Any]:
        """Shares of each token's components, over the layers that hold it as no longer recent.

        A long row's are those of some neighbours together, so that the record stays small.
        """
        if self._blocks is None:
            return {}
        counts = self._blocks[:, : int(self._blocks[0].nonzero()[0].max(initial=-1)) + 1]
        together = -(-counts.shape[1] // MOST_TOKENS) or 1
        counts = np.pad(counts, ((0, 0), (0, -counts.shape[1] % together)))
        layers, *sides = counts.reshape(3, -1, together).sum(-1)
        every = layers * self._geometry.projector.blocks
        keys, values = (
            [round(int(x) / int(n), 4) if n else None for x, n in zip(side, every, strict=True)]
            for side in sides
        )
        return {"per_token": {"tokens_each": together, "keys": keys, "values": values}}


def _coded(layer: LayerGeometry) -> list[str]:
    """Names of the codecs of a layer, without that of its recent tokens."""
    kept = layer.classes[1:] or layer.classes
    return list(dict.fromkeys(part.codec.name for part in kept))


def _thoughts(seen: list[Thoughts], row: Row) -> dict[str, Any]:
    """What the row's thoughts are, and how often this run has worked on them."""
    if not seen:
        return {}
    last, past, began = seen[-1], row.request.past, len(row.request.ids)
    kinds = "".join(KINDS[kind] for kind in last.kind if kind >= 0)
    told, demoted = len(kinds), np.array([np.zeros(2, int), *(x.demoted for x in seen)])
    if past is not None:  # whose work is none of this run's
        began = past.length
        told -= int((past.row["thoughts.kind"] >= 0).sum())
        demoted[0] = past.row["thoughts.demoted"]
    steps = max(len(row.request.ids) + len(row.tokens) - 1 - began, 1)
    by_transition, by_budget = map(int, demoted[-1] - demoted[0])
    events = int((np.diff(demoted.sum(1)) > 0).sum())
    known = last.sparsity[: len(kinds)]
    return {
        "thoughts": {
            **{kind: kinds.count(kind) for kind in KINDS},
            "kinds": kinds,
            "sparsity": [None if np.isnan(value) else float(value) for value in known],
            "demotions": {"transition": by_transition, "budget": by_budget},
            "refresh_rate": told / steps,
            "eviction_rate": events / steps,
        }
    }


def _cached(request: Request) -> dict[str, int]:
    """Tokens of the prompt that were in the cache already, where there was one to go on from."""
    return {} if request.past is None else {"cached": request.past.length}


def report(
    lm: LanguageModel,
    options: Options,
    planned: Plan,
    lap: Lap,
    log: BytesLog,
    row: Row,
) -> dict[str, Any]:
    """One request's record. Its times begin when it gets its row; compilation is apart."""
    settings = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    del settings["recipe"]  # which has a form of its own
    return {
        "usage": {
            "prompt": len(row.request.ids),
            "generated": len(row.tokens),
            "think": row.think_tokens,
            **_cached(row.request),
        },
        "timing": lap.as_dict(),
        "kv": {
            "method": options.recipe.name,
            "budget": options.recipe.budget,
            **log.as_dict(),
            **_thoughts(log.thoughts, row),
        },
        "memory": memory_in_use(),
        "run": {
            "kvjax": __version__,
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
            "dtype": str(lm.dtype),
            "model": lm.source,
            "model_revision": lm.revision,
            "model_fingerprint": lm.fingerprint,
            "parameter_bytes": planned.parameter_bytes,
            "tp": shards(lm.mesh),
            "recipe": as_dict(options.recipe),
            **{name: list(v) if isinstance(v, tuple) else v for name, v in settings.items()},
        },
    }
