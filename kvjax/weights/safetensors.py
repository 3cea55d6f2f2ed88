"""Weights in safetensors files: one file, or shards with an index."""

import json
import pathlib
from collections.abc import Mapping

import numpy as np
from safetensors import SafetensorError, safe_open

from kvjax.errors import ModelError
from kvjax.weights import mxfp4
from kvjax.weights.checkpoint import sample_positions

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = ("F32", "F16", "BF16")
_BLOCKS, _SCALES = "_blocks", "_scales"
_SAMPLE = 64


class SafetensorsCheckpoint:
    """The tensors of a Hugging Face model directory.

    MXFP4 pairs ``*_blocks`` and ``*_scales`` are shown as the one plain tensor that they stand for.
    """

    def __init__(self, directory: pathlib.Path):
        self.source = str(directory)
        self._files, self._where = _open(directory)
        stored = frozenset(self._where)
        self._packed = frozenset(
            name.removesuffix(_BLOCKS)
            for name in stored
            if name.endswith(_BLOCKS) and name.removesuffix(_BLOCKS) + _SCALES in stored
        )
        parts = {base + suffix for base in self._packed for suffix in (_BLOCKS, _SCALES)}
        self.names = (stored - parts) | self._packed
        for name in sorted(stored):
            expected = ("U8",) if name in parts else _FLOATS
            if (dtype := self._slice(name).get_dtype()) not in expected:
                raise ModelError(
                    f"{self._where[name]}: tensor {name} is stored as {dtype}, which is not "
                    f"supported; convert the weights to one of {', '.join(_FLOATS)}"
                )
        for base in self._packed:
            self._check_packed(base)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._packed:
            experts, out, groups = self._stored_shape(name + _SCALES)
            return experts, groups * 32, out
        return self._stored_shape(name)

    def read(self, name: str) -> np.ndarray:
        if name in self._packed:
            return mxfp4.dequantise_experts(self._get(name + _BLOCKS), self._get(name + _SCALES))
        return self._get(name)

    def digest(self, name: str) -> bytes:
        parts = (name + _BLOCKS, name + _SCALES) if name in self._packed else (name,)
        return b"".join(self._sample(part) for part in parts)

    def _slice(self, name: str):
        return self._files[self._where[name]].get_slice(name)

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def _get(self, name: str) -> np.ndarray:
        try:
            return self._files[self._where[name]].get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            where = self._where[name]
            raise ModelError(f"{where}: tensor {name} is unreadable ({error})") from error

    def _sample(self, name: str) -> bytes:
        view, shape = self._slice(name), self._stored_shape(name)
        head = view.get_dtype().encode()
        if not shape or 0 in shape:
            return head
        # The start of a few rows; of a vector, its start.
        rows = sample_positions(shape[0], 1) if len(shape) > 1 else [0]
        step = 1 if len(shape) > 1 else _SAMPLE
        inner = [slice(min(size, _SAMPLE)) for size in shape[1:]]
        inner[:-1] = [slice(1)] * (len(inner) - 1)
        pieces = (view[(slice(row, min(row + step, shape[0])), *inner)] for row in rows)
        return head + b"".join(np.ascontiguousarray(piece).tobytes() for piece in pieces)

    def _check_packed(self, base: str) -> None:
        blocks, scales = (self._stored_shape(base + suffix) for suffix in (_BLOCKS, _SCALES))
        if len(scales) != 3 or blocks != (*scales, 16):
            raise ModelError(
                f"{self._where[base + _BLOCKS]}: tensor {base + _BLOCKS} has shape {blocks}, "
                f"expected (experts, out, in / 32, 16) beside {base + _SCALES} of shape {scales}"
            )


def _open(directory: pathlib.Path) -> tuple[dict[pathlib.Path, safe_open], dict[str, pathlib.Path]]:
    """The opened files, and the file that holds each stored tensor."""
    if (single := directory / _SINGLE).exists():
        handle = _open_file(single)
        return {single: handle}, dict.fromkeys(handle.keys(), single)
    if (index := directory / _INDEX).exists():
        where = _read_index(index)
        files = {path: _open_file(path) for path in sorted(set(where.values()))}
        held = {path: frozenset(handle.keys()) for path, handle in files.items()}
        for name, path in where.items():
            if name not in held[path]:
                raise ModelError(
                    f"{index}: says that tensor {name} is in {path.name}, but it is not there; "
                    "the index and the shards do not belong together, fetch both again"
                )
        return files, where
    raise ModelError(_no_weights(directory))


def _open_file(path: pathlib.Path) -> safe_open:
    if not path.is_file():
        raise ModelError(f"{path}: shard is missing though the index names it; fetch it again")
    if not path.stat().st_size:
        raise ModelError(f"{path}: file is empty, expected safetensors; fetch it again")
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path}: not a whole safetensors file ({path.stat().st_size:,} bytes; {error}); "
            "it is truncated or damaged, fetch it again"
        ) from error


def _read_index(index: pathlib.Path) -> dict[str, pathlib.Path]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{index}: not a safetensors index ({type(error).__name__}: {error}), expected JSON "
            "with a weight_map; fetch it again"
        ) from error
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ModelError(f"{index}: weight_map must map tensor names to shards, got {weight_map!r}")
    return {name: index.parent / _shard_name(index, shard) for name, shard in weight_map.items()}


def _shard_name(index: pathlib.Path, shard: object) -> str:
    """A bare file name: an index must not reach files outside its directory."""
    bare = isinstance(shard, str) and not set(shard) & set("/\\\0")
    if not bare or not shard.endswith(".safetensors"):
        raise ModelError(
            f"{index}: names the shard {shard!r}, expected the name of a .safetensors file in the "
            "same directory; fetch the index again"
        )
    return shard


def _no_weights(directory: pathlib.Path) -> str:
    def found(pattern: str) -> list[str]:
        return sorted(path.name for path in directory.glob(pattern))

    if gguf := found("*.gguf"):
        return f"{directory}: no {_SINGLE}, but {gguf[0]}; pass the path of the GGUF file itself"
    if pickles := found("*.bin") + found("*.pt") + found("*.pth"):
        return (
            f"{directory}: weights only in {pickles[0]}, a pickle, which can run code and is never "
            "read; convert it to safetensors with transformers' save_pretrained"
        )
    if shards := found("*.safetensors"):
        return f"{directory}: {shards[0]}, but neither {_SINGLE} nor {_INDEX}; fetch the index too"
    return f"{directory}: no weights, expected {_SINGLE} or {_INDEX} with its shards"
