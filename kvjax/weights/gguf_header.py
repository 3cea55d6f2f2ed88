"""The header of a GGUF file: metadata and the table of tensors.

Every count and offset is held against the size of the file before it is believed, so a damaged
file ends in a message, never in a hang or in a huge allocation. (The ``gguf`` package's reader
checks none of them, and takes two seconds over the token lists of a small model.)
"""

import dataclasses
import math
import os
import pathlib
import struct
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from kvjax.errors import ModelError

_SCALARS = {
    GGUFValueType.UINT8: "u1",
    GGUFValueType.INT8: "i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
_SMALLEST_ENTRY = 12  # bytes that a metadata entry or a table entry takes at the very least
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies."""

    shape: tuple[int, ...]  # slowest dimension first, as numpy has it
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    row_bytes: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])


@dataclasses.dataclass(frozen=True)
class Header:
    """All that a GGUF file says before its data."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: pathlib.Path) -> Header:
    """Read and check the header of a GGUF file."""
    try:
        with path.open("rb") as file:
            return _Reader(path, file).header()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Reader:
    def __init__(self, path: pathlib.Path, file: BinaryIO):
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size

    def fail(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {problem}; the file is truncated or damaged, get it again")

    def header(self) -> Header:
        if (magic := self.take(4, "the magic number")) != b"GGUF":
            raise ModelError(
                f"{self.path}: starts with {magic!r}, so it is not a GGUF file; pass a GGUF file, "
                "a directory with config.json and safetensors, or a hub id (owner/name)"
            )
        version = self.scalar("<u4")
        if version not in (2, 3):
            raise ModelError(
                f"{self.path}: GGUF version {version} is not supported, expected 2 or 3 in "
                "little-endian order; convert the model again"
            )
        tensor_count, key_count = self.count("tensors"), self.count("metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.string("a metadata key")
            if key in metadata:
                raise self.fail(f"metadata key {key!r} occurs twice")
            metadata[key] = self.value(key, self.value_type(key))
        entries = [self.table_entry() for _ in range(tensor_count)]
        start = self.data_start(metadata)
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise self.fail(f"tensor {name} occurs twice")
            tensors[name] = self.tensor(name, shape, kind, start + offset)
        return Header(metadata, tensors)

    def take(self, count: int, what: str) -> bytes:
        left = self.size - self.file.tell()
        if count > left:
            raise self.fail(f"{what} claims {count:,} bytes, but {left:,} are left")
        data = self.file.read(count)
        if len(data) != count:
            raise self.fail(f"{what} ends early")
        return data

    def scalar(self, dtype: str) -> Any:
        kind = np.dtype(dtype)
        return np.frombuffer(self.take(kind.itemsize, "a value"), kind)[0].item()

    def count(self, what: str) -> int:
        count = self.scalar("<u8")
        if count * _SMALLEST_ENTRY > self.size:
            raise self.fail(f"claims {count:,} {what}, more than fit into {self.size:,} bytes")
        return count

    def string(self, what: str) -> str:
        (length,) = struct.unpack("<Q", self.take(8, what))
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error

    def value_type(self, key: str) -> GGUFValueType:
        number = self.scalar("<u4")
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise self.fail(f"metadata {key!r} has the unknown type {number}") from error

    def value(self, key: str, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string(f"metadata {key!r}")
        if kind != GGUFValueType.ARRAY:
            return self.scalar(_SCALARS[kind])
        item, length = self.value_type(key), self.scalar("<u8")
        if item == GGUFValueType.ARRAY:
            raise self.fail(f"metadata {key!r} is an array of arrays, which is not supported")
        width = 8 if item == GGUFValueType.STRING else np.dtype(_SCALARS[item]).itemsize
        if length * width > self.size:
            raise self.fail(f"metadata {key!r} claims {length:,} items")
        if item == GGUFValueType.STRING:
            return [self.string(f"metadata {key!r}") for _ in range(length)]
        raw = self.take(length * width, f"metadata {key!r}")
        return np.frombuffer(raw, _SCALARS[item]).tolist()

    def table_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string("a tensor name")
        dims = self.scalar("<u4")
        if not 1 <= dims <= _MAX_DIMS:
            raise self.fail(f"tensor {name} claims {dims} dimensions, expected 1 to {_MAX_DIMS}")
        shape = struct.unpack(f"<{dims}Q", self.take(8 * dims, f"tensor {name}"))
        return name, shape[::-1], self.scalar("<u4"), self.scalar("<u8")

    def data_start(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.fail(f"general.alignment is {alignment!r}, expected a power of two")
        return -(-self.file.tell() // alignment) * alignment

    def tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> TensorInfo:
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise self.fail(f"tensor {name} has the unknown type {number}") from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if min(shape) < 1 or shape[-1] % block:
            raise self.fail(
                f"tensor {name} of shape {shape} cannot hold blocks of {block} ({kind.name})"
            )
        info = TensorInfo(shape, kind, offset, shape[-1] // block * block_bytes)
        if (end := offset + info.rows * info.row_bytes) > self.size:
            raise self.fail(
                f"tensor {name} of shape {shape} ({kind.name}) ends at byte {end:,}, "
                f"but the file has {self.size:,}"
            )
        return info
