"""The shape of a model, read from a Hugging Face ``config.json``.

A field that changes what the model computes is either honoured or refused by name; a model that
would quietly compute something else is never built.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from kvjax.errors import ModelError
from kvjax.models.fields import REQUIRED, Fields
from kvjax.models.rope import RopeConfig, stretched_context

FAMILIES = ("llama", "qwen2", "qwen3", "gpt_oss")
# What transformers assumes for a gpt_oss config that says nothing of its positions.
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
MOST_LAYERS = 4096
"""More than any model has: a damaged header must not make millions of layers."""
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything that decides a decoder's parameters and arithmetic.

    Attributes:
        context_length: tokens that positions are made for: `max_position_embeddings`, or what it
            is stretched to where that is more.
        windows: for each layer, how many tokens a query sees (itself included), None for all.
        sinks: whether each head has a learned logit that takes part in its softmax.
        mlp_bias: biases of the feed-forward layers; always there with experts.
        num_experts: 0 for a dense model.
        swiglu_limit: clip of the experts' gate (above) and up projection (both sides).
        swiglu_alpha: gain of the sigmoid in the experts' activation.
    """

    family: Literal["llama", "qwen2", "qwen3", "gpt_oss"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    context_length: int
    windows: tuple[int | None, ...]
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """Factor on the attention logits."""
        return self.head_dim**-0.5

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Read a parsed ``config.json``.

        Raises:
            ModelError: a field is missing, malformed, or asks for what is not supported.
        """
        fields = Fields(config)
        family = fields.choice("model_type", FAMILIES)
        _refuse_unsupported(fields, family)
        gpt_oss = family == "gpt_oss"
        layers = fields.count("num_hidden_layers", maximum=MOST_LAYERS)
        rope = RopeConfig.from_hf(
            fields,
            theta=150_000.0 if gpt_oss else 10_000.0,
            scaling=_GPT_OSS_ROPE if gpt_oss else None,
        )
        return cls(
            family=family,
            vocab_size=fields.count("vocab_size"),
            hidden_size=fields.count("hidden_size"),
            intermediate_size=fields.count("intermediate_size"),
            num_layers=layers,
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope=rope,
            context_length=max(
                fields.count("max_position_embeddings"), stretched_context(fields, rope)
            ),
            windows=_windows(fields, family, layers),
            tie_embeddings=fields.flag("tie_word_embeddings", False),
            mlp_bias=gpt_oss or fields.flag("mlp_bias", False),
            qk_norm=family == "qwen3",
            **_heads(fields, family),
            **_attention_biases(fields, family),
            **(_experts(fields) if gpt_oss else {}),
        )


def _refuse_unsupported(fields: Fields, family: str) -> None:
    fields.only("hidden_act", "silu")
    fields.only("partial_rotary_factor", 1.0)
    fields.only("is_causal", True)
    fields.only("per_layer_config", None)
    fields.only("compression_config", None)
    fields.only("use_mrope", False)
    if family == "llama":
        fields.only("sliding_window", None)
        fields.only("use_sliding_window", False)
    elif family == "qwen2":
        fields.only("attention_bias", True)
    if family in ("qwen2", "qwen3"):
        fields.only("mlp_bias", False)
    if fields.get("quantization_config") is not None:
        method = fields.child("quantization_config").get("quant_method")
        if (family, method) != ("gpt_oss", "mxfp4"):
            raise ModelError(
                f"`quantization_config.quant_method` {method!r} is not supported for {family} "
                "(supported: 'mxfp4' for gpt_oss); use an unquantised checkpoint or a GGUF file"
            )


def _heads(fields: Fields, family: str) -> dict[str, int]:
    heads = fields.count("num_attention_heads")
    # Only llama and qwen2 derive what is left out; the other families have defaults of one size.
    kv_heads = fields.count("num_key_value_heads", heads if family == "llama" else REQUIRED)
    if heads % kv_heads:
        raise ModelError(
            f"`num_attention_heads` {heads} must be a multiple of `num_key_value_heads` {kv_heads}"
        )
    hidden = fields.count("hidden_size")
    head_dim = fields.count("head_dim", None if family in ("llama", "qwen2") else REQUIRED)
    if head_dim is None:
        if hidden % heads:
            raise ModelError(
                f"`hidden_size` {hidden} must be a multiple of `num_attention_heads` {heads} "
                "where `head_dim` is not given"
            )
        head_dim = hidden // heads
    if head_dim % 2:
        raise ModelError(f"`head_dim` must be even for rotary positions, got {head_dim}")
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}


def _attention_biases(fields: Fields, family: str) -> dict[str, bool]:
    if family == "qwen2":
        return {"qkv_bias": True, "out_bias": False}
    bias = fields.flag("attention_bias", family == "gpt_oss")
    return {"qkv_bias": bias, "out_bias": bias}


def _experts(fields: Fields) -> dict[str, Any]:
    experts, chosen = fields.count("num_local_experts"), fields.count("num_experts_per_tok")
    if chosen > experts:
        raise ModelError(
            f"`num_experts_per_tok` {chosen} must not exceed `num_local_experts` {experts}"
        )
    return {
        "sinks": True,
        "num_experts": experts,
        "experts_per_token": chosen,
        "swiglu_limit": fields.number("swiglu_limit", 7.0),
        "swiglu_alpha": fields.number("swiglu_alpha", 1.702),
    }


def _windows(fields: Fields, family: str, layers: int) -> tuple[int | None, ...]:
    kinds = _layer_types(fields, layers)
    if family == "gpt_oss":
        kinds = kinds or [_FULL if i % 2 else _SLIDING for i in range(layers)]
    elif family != "llama" and fields.flag("use_sliding_window", False):
        if kinds is None:
            first = fields.count("max_window_layers", minimum=0)
            kinds = [_SLIDING if i >= first else _FULL for i in range(layers)]
    elif kinds is not None and _SLIDING in kinds:
        raise ModelError(
            f"`layer_types` names {_SLIDING} layers, which need `use_sliding_window` true"
            if family != "llama"
            else f"`layer_types` {_SLIDING!r} is not supported for llama"
        )
    if kinds is None or _SLIDING not in kinds:
        return (None,) * layers
    window = fields.count("sliding_window")
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _layer_types(fields: Fields, layers: int) -> list[str] | None:
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelError(
            f"`layer_types` must be a list with one entry for each of the {layers} layers "
            f"(`num_hidden_layers`), got {kinds!r}"
        )
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise ModelError(
                f"`layer_types` {kind!r} is not supported (supported: {_FULL}, {_SLIDING})"
            )
    return kinds
