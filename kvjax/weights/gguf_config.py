"""Translating GGUF metadata to the fields of a Hugging Face config.json."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax.errors import ModelError

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_KNOWN_KEYS = frozenset(
    {
        "vocab_size",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
# Keys that change nothing while they hold these values.
_NEUTRAL = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.sliding_window": 0,
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}
# Llama 3's frequency scaling: a file carries its result, not these numbers.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def check_architecture(source: str, metadata: Mapping[str, Any]) -> str:
    """The file's architecture, if it is one of those that are supported."""
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{source}: GGUF architecture {architecture!r} is not supported, expected one of "
            f"{', '.join(_ARCHITECTURES)}; gpt_oss loads from a safetensors directory"
        )
    return architecture


def hf_config(
    source: str,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: np.ndarray | None,
) -> dict[str, Any]:
    """A config.json's fields.

    Args:
        source: the file, for messages.
        metadata: the file's metadata.
        shapes: the tensors' shapes under their Hugging Face names.
        rope_factors: what each rotary frequency is divided by, [head_dim / 2], or None.
    """
    fields = _Fields(source, metadata)
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = _head_dim(fields, heads, hidden)
    if "model.embed_tokens.weight" not in shapes:
        raise ModelError(f"{source}: no tensor token_embd.weight, so it is no language model")
    theta = fields.number("rope.freq_base", 10000.0)
    config = {
        "model_type": fields.architecture,
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.integer("context_length"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(fields, theta, head_dim, rope_factors),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "hidden_act": "silu",
    }
    if fields.architecture == "llama":
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in shapes
        config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in shapes
    return config


class _Fields:
    """Typed look-ups of one architecture's keys; a key that is not understood is refused."""

    def __init__(self, source: str, metadata: Mapping[str, Any]):
        self.source = source
        self.architecture = check_architecture(source, metadata)
        prefix = f"{self.architecture}."
        self.values = {
            key.removeprefix(prefix): value
            for key, value in metadata.items()
            if key.startswith(prefix)
        }
        for key, value in self.values.items():
            neutral = key in _NEUTRAL and value == _NEUTRAL[key]
            if key not in _KNOWN_KEYS and not neutral:
                raise self.unsupported(key)

    def unsupported(self, key: str) -> ModelError:
        return ModelError(
            f"{self.source}: metadata {self.architecture}.{key} = {self.values[key]!r} "
            "is not supported"
        )

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(
                f"{self.source}: metadata {self.architecture}.{key} is {value!r}, "
                "expected a positive integer"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float. Files hold float32, so 1e-5 is read as 1e-5 and not as 9.9999997e-06."""
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ModelError(
                f"{self.source}: metadata {self.architecture}.{key} is {value!r}, "
                "expected a positive number"
            )
        return float(str(np.float32(value)))


def _head_dim(fields: _Fields, heads: int, hidden: int) -> int:
    head_dim = fields.integer("attention.key_length", max(hidden // heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise fields.unsupported(key)
    return head_dim


def _rope_scaling(
    fields: _Fields, theta: float, head_dim: int, factors: np.ndarray | None
) -> dict[str, Any] | None:
    kind = fields.values.get("rope.scaling.type", "none")
    if "rope.scale_linear" in fields.values and kind == "none":
        kind, factor = "linear", fields.number("rope.scale_linear")
    elif kind != "none":
        factor = fields.number("rope.scaling.factor", 1.0)
    if factors is not None:
        if kind != "none":
            raise fields.unsupported("rope.scaling.type")
        return _llama3_scaling(fields.source, theta, head_dim, factors)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor}
        key = "rope.scaling.original_context_length"
        if key in fields.values:
            scaling["original_max_position_embeddings"] = fields.integer(key)
        for name in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{name}" in fields.values:
                scaling[name] = fields.number(f"rope.scaling.yarn_{name}")
        return scaling
    if kind != "none":
        raise fields.unsupported("rope.scaling.type")
    return None


def _llama3_scaling(
    source: str, theta: float, head_dim: int, factors: np.ndarray
) -> dict[str, Any] | None:
    """The Llama 3 scaling whose frequency factors are these, or a refusal."""
    # First of all: a damaged head_dim must not make an array of its size.
    if factors.ndim != 1 or 2 * factors.size != head_dim:
        raise ModelError(
            f"{source}: tensor rope_freqs.weight has shape {list(factors.shape)}, expected half of "
            f"the head size {head_dim}"
        )
    factor = float(str(np.float32(factors.max())))
    known = 0 < factor < math.inf
    if not known or not np.allclose(factors, _llama3_factors(theta, head_dim, factor), rtol=1e-4):
        raise ModelError(
            f"{source}: tensor rope_freqs.weight is not Llama 3's frequency scaling, "
            "and no other is supported"
        )
    return None if factor == 1 else {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """What Llama 3 divides each rotary frequency by, [head_dim / 2]."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3["original_max_position_embeddings"] / wavelengths
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
