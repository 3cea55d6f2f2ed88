"""Whether a packed row is what a cache could hold."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax.cache.packed import COUNTERS, Packed
from kvjax.errors import UsageError
from kvjax.thoughts.state import KINDS, NO_KIND
from pallas_kernels.layout import SLOT_AXIS


def check_counters(packed: Packed) -> None:
    """Refuse numbers of tokens that contradict each other.

    Raises:
        UsageError: naming the one.
    """
    for name in COUNTERS:
        _check_array(packed, name, (), np.int32)
    length = packed["length"]
    limits = {"length": (1, np.inf), "prompt": (1, length), "stored": (0, length)}
    for name, (low, high) in (limits | {"crowded": (0, np.inf)}).items():
        if not low <= packed[name] <= high:
            raise UsageError(f"{name} is {packed[name]}, which no cache has")


def check_row(packed: Packed, whole: Mapping[str, Any], *, forgets: bool = True) -> None:
    """Refuse a packed row that is not one of a cache.

    Args:
        packed: whose counters have been checked.
        whole: arrays of ``kvjax.cache.packed.named``, or shapes and dtypes of such.
        forgets: whether free slots are never attended.

    Raises:
        UsageError: naming the array.
    """
    tables = {name.removesuffix(".table") for name in whole if name.endswith(".table")}
    pages = {f"{place}.pages" for place in tables}
    expected = whole.keys() - {f"{place}.table" for place in tables} | pages | {*COUNTERS}
    if wrong := sorted(expected ^ packed.keys()):
        raise UsageError(f"{wrong[0]} is {'missing' if wrong[0] in expected else 'unknown'}")
    segments = packed.get("thoughts.kind", np.zeros(0)).size
    for name in sorted(expected - pages - {*COUNTERS}):
        place, _, part = name.rpartition(".")
        shape = whole[name].shape
        if place in tables and part in SLOT_AXIS:
            _check_array(packed, f"{place}.pages", whole[f"{place}.table"].shape[1:2], np.int32)
            shape = (max(0, int(packed[f"{place}.pages"].sum(dtype=np.int64))), *shape[1:])
        elif place not in tables:  # a row's own
            shape = shape[1:]
        if place == "thoughts" and part != "demoted":
            shape = (min(segments, *shape),)
        _check_array(packed, name, shape, whole[name].dtype)
    for place in sorted(tables):
        counts = packed[f"{place}.pages"]
        if (counts < 0).any():
            raise UsageError(f"{place}.pages counts less than none")
        _check_slots(packed, place, counts, forgets)
        if place.endswith(".0"):
            _check_places(packed, place, counts, whole[f"{place}.table"].shape[2])
    if "thoughts.kind" in packed:
        _check_thoughts(packed)


def _check_array(packed: Packed, name: str, shape: tuple[int, ...], dtype) -> None:
    if name not in packed:
        raise UsageError(f"{name} is missing")
    array = packed[name]
    if array.shape != shape or array.dtype != dtype:
        raise UsageError(
            f"{name} must be {np.dtype(dtype).name} {list(shape)}, got {array.dtype.name} "
            f"{list(array.shape)}"
        )
    whole = np.issubdtype(array.dtype, np.integer)
    biases, unknown = name.endswith(".bias"), name == "thoughts.sparsity"
    if not (whole or biases or unknown or np.isfinite(array).all()):
        raise UsageError(f"{name} is not finite")


def _check_slots(packed: Packed, place: str, counts: np.ndarray, forgets: bool) -> None:
    """Every token has one slot of a head, and a bias where slots have them."""
    pos = packed[f"{place}.pos"]
    if ((pos < -1) | (pos >= packed["length"])).any():
        raise UsageError(f"{place}.pos has positions that have not been read")
    head = np.broadcast_to(np.repeat(np.arange(len(counts)), counts)[:, None], pos.shape)
    live = np.stack([head[pos >= 0], pos[pos >= 0]])
    if np.unique(live, axis=1).shape != live.shape:
        raise UsageError(f"{place}.pos has a token twice")
    if (bias := packed.get(f"{place}.bias")) is None:
        return
    if not np.isfinite(bias[pos >= 0]).all() or not (bias < np.inf).all():
        raise UsageError(f"{place}.bias is not finite")
    if forgets and (bias[pos < 0] > -np.inf).any():
        raise UsageError(f"{place}.bias has slots without a token")


def _check_places(packed: Packed, place: str, counts: np.ndarray, width: int) -> None:
    """The first class has a token at the slot of its position."""
    pos = packed[f"{place}.pos"]
    page = np.concatenate([np.arange(count) for count in counts])
    slot = page[:, None] * pos.shape[1] + np.arange(pos.shape[1])
    if (page >= width).any() or ((pos >= 0) & (pos % (width * pos.shape[1]) != slot)).any():
        raise UsageError(f"{place}.pos has a token out of its place")


def _check_thoughts(packed: Packed) -> None:
    kind = packed["thoughts.kind"]
    if ((kind < NO_KIND) | (kind >= len(KINDS))).any():
        raise UsageError("thoughts.kind has kinds that there are not")
    for name in ("thoughts.level", "thoughts.demoted"):
        if (packed[name] < 0).any():
            raise UsageError(f"{name} counts less than none")
