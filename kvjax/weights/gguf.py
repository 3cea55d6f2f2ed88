"""Weights in a GGUF file, under Hugging Face's names and in its layouts."""

import pathlib
import re
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, dequantize

from kvjax.errors import ModelError
from kvjax.weights.checkpoint import sample_positions
from kvjax.weights.gguf_config import check_architecture, hf_config
from kvjax.weights.gguf_header import TensorInfo, read_header

_ROPE_FREQS = "rope_freqs.weight"
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_Type = GGMLQuantizationType
SUPPORTED_TYPES = (
    *(_Type.F32, _Type.F16, _Type.BF16, _Type.Q8_0),
    *(_Type.Q4_0, _Type.Q4_1, _Type.Q5_0, _Type.Q5_1),
    *(_Type.Q4_K, _Type.Q5_K, _Type.Q6_K),
)
_PLAIN = {  # read as they are, without the dequantiser's copy to float32
    _Type.F32: np.dtype(np.float32),
    _Type.F16: np.dtype(np.float16),
    _Type.BF16: np.dtype(ml_dtypes.bfloat16),
}
_SLICE_ELEMENTS = 1 << 21  # numbers dequantised together: their temporaries stay small
_SAMPLE = 64


class GGUFCheckpoint:
    """The tensors and the metadata of one GGUF file (architectures llama, qwen2 and qwen3)."""

    def __init__(self, path: pathlib.Path):
        self.source = str(path)
        header = read_header(path)
        self.metadata = header.metadata
        self._path = path
        self._stored = {hf_name(name): info for name, info in header.tensors.items()}
        self._architecture = check_architecture(self.source, self.metadata)
        self._check_types()
        factors = self._dequantise(_ROPE_FREQS) if _ROPE_FREQS in self._stored else None
        shapes = {name: info.shape for name, info in self._stored.items()}
        self._hf_config = hf_config(self.source, self.metadata, shapes, factors)
        self.names = frozenset(self._stored) - {_ROPE_FREQS}

    def hf_config(self) -> dict[str, Any]:
        """What the model's config.json would say."""
        return self._hf_config

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def read(self, name: str) -> np.ndarray:
        array = self._dequantise(name)
        heads = self._interleaved_heads(name)
        return _split_halves(array, heads) if heads else array

    def digest(self, name: str) -> bytes:
        info = self._stored[name]
        size = info.rows * info.row_bytes
        with self._path.open("rb") as file:
            pieces = []
            for position in sample_positions(size, _SAMPLE):
                file.seek(info.offset + position)
                pieces.append(file.read(min(_SAMPLE, size)))
        return info.kind.name.encode() + b"".join(pieces)

    def _check_types(self) -> None:
        for name, info in self._stored.items():
            if info.kind not in SUPPORTED_TYPES:
                raise ModelError(
                    f"{self.source}: tensor {name} is stored as {info.kind.name}, which is not "
                    f"supported; use a file with {', '.join(t.name for t in SUPPORTED_TYPES)}"
                )

    def _interleaved_heads(self, name: str) -> int:
        """How many heads' rows are in llama.cpp's rotary order; 0 for any other tensor."""
        if self._architecture != "llama":
            return 0
        if ".q_proj." in name:
            return self._hf_config["num_attention_heads"]
        return self._hf_config["num_key_value_heads"] if ".k_proj." in name else 0

    def _dequantise(self, name: str) -> np.ndarray:
        info = self._stored[name]
        out = np.empty(info.shape, _PLAIN.get(info.kind, np.dtype(np.float32)))
        rows = out.reshape(info.rows, info.shape[-1])
        step = max(1, _SLICE_ELEMENTS // info.shape[-1])
        try:
            with self._path.open("rb") as file:
                file.seek(info.offset)
                for start in range(0, info.rows, step):
                    _read_rows(file, info, rows[start : start + step])
        except OSError as error:
            raise ModelError(f"{self.source}: cannot be read: {error.strerror or error}") from error
        except EOFError as error:
            raise ModelError(f"{self.source}: tensor {name} ends early; fetch it again") from error
        return out


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; a name without a counterpart stays as it is."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER[part]}.{kind}" if part in _LAYER else name
    part, _, kind = name.rpartition(".")
    return f"{_TOP[part]}.{kind}" if part in _TOP else name


def _read_rows(file, info: TensorInfo, out: np.ndarray) -> None:
    if info.kind in _PLAIN:
        if file.readinto(out.view(np.uint8)) != out.nbytes:
            raise EOFError
        return
    raw = np.empty((out.shape[0], info.row_bytes), np.uint8)
    if file.readinto(raw) != raw.nbytes:
        raise EOFError
    with np.errstate(all="ignore"):  # damaged scales: the caller refuses what is not finite
        out[...] = dequantize(raw, info.kind)


def _split_halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's rotary order: interleaved pairs of rows become the two halves of a head."""
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)
