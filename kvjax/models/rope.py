"""Rotary position embedding: its frequencies under each kind of scaling, and the rotation itself.

The frequencies are computed in float32, operation by operation in the order of transformers'
reference, because at position 100,000 a last-bit difference in a frequency is a visible angle.
"""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.errors import ModelError
from kvjax.models.fields import Fields

_ORIGINAL = "original_max_position_embeddings"
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor", _ORIGINAL}
_PARAMETERS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    },
}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """How positions become angles.

    Attributes:
        theta: base of the geometric series of wavelengths.
        kind: the scaling.
        factor: by how much the context is stretched (all kinds but "default").
        original_context: the context length before the stretch ("llama3" and "yarn").
        low_freq_factor: "llama3": wavelengths above original_context / this are stretched in full.
        high_freq_factor: "llama3": wavelengths below original_context / this are left alone.
        beta_fast: "yarn": dimensions that turn more often than this are left alone.
        beta_slow: "yarn": dimensions that turn less often than this are stretched in full.
        mscale: "yarn": with ``mscale_all_dim``, replaces the default attention factor.
        mscale_all_dim: see ``mscale``.
        attention_factor: "yarn": scale of the rotated q and k, None for the one of the paper.
        truncate: "yarn": round the two dimensions that bound the ramp to whole ones.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_context: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @classmethod
    def from_hf(cls, fields: Fields, theta: float, scaling: dict | None = None) -> "RopeConfig":
        """Read ``rope_parameters``, or the older ``rope_theta`` and ``rope_scaling``.

        Args:
            fields: the whole model config.
            theta: the family's base, used where the config gives none.
            scaling: the family's scaling, used where the config gives none.
        """
        name, rope = _scaling_fields(fields, scaling)
        if rope.get("rope_type") is None and rope.get("type") is not None:
            kind = rope.choice("type", _PARAMETERS)
        else:
            kind = rope.choice("rope_type", _PARAMETERS, "default")
        for key in rope:
            if key not in _COMMON | _PARAMETERS[kind]:
                raise ModelError(f"{rope.path(key)} is not supported for {kind!r} RoPE ({name})")
        rope.only("partial_rotary_factor", 1.0)
        given = _once(fields, rope, "rope_theta", Fields.number)
        theta = theta if given is None else given
        if theta <= 1:
            raise ModelError(f"`rope_theta` must be above 1, got {theta}")
        if kind == "default":
            return cls(theta)
        scaled = cls(theta, kind, rope.number("factor"))
        if kind == "linear":
            return scaled
        original = _once(fields, rope, _ORIGINAL, Fields.count)
        original = original or fields.count("max_position_embeddings")
        scaled = dataclasses.replace(scaled, original_context=original)
        return _read_llama3(scaled, rope) if kind == "llama3" else _read_yarn(scaled, rope)


def stretched_context(fields: Fields, rope: RopeConfig) -> int:
    """Tokens that a stretched model is for by its own words; 0 where it says nothing of that.

    A model that was published stretched has a `max_position_embeddings` of that many already. One
    that its users are told to stretch keeps the old one, as Qwen2.5 and Qwen3 do under YaRN.
    Llama 3's factor says nothing: 32 times 8192 is twice what Llama 3.2 was trained for.

    Args:
        fields: the whole model config.
        rope: what was read out of it.
    """
    original = _once(fields, _scaling_fields(fields, None)[1], _ORIGINAL, Fields.count)
    if original is None or rope.kind not in ("linear", "yarn"):
        return 0
    return int(min(rope.factor * original, np.iinfo(np.int32).max))


def _scaling_fields(fields: Fields, default: dict | None) -> tuple[str, Fields]:
    new, old = fields.get("rope_parameters"), fields.get("rope_scaling")
    if new and old and new != old:
        raise ModelError(f"`rope_parameters` {new!r} and `rope_scaling` {old!r} contradict")
    name = "rope_scaling" if new is None and old is not None else "rope_parameters"
    if new is None and old is None:
        return name, Fields(default or {}, name)
    return name, fields.child(name)


def _once(fields: Fields, rope: Fields, name: str, read):
    """A field that may stand in the scaling or beside it, but not with two values."""
    outer, inner = read(fields, name, None), read(rope, name, None)
    if outer is not None and inner is not None and outer != inner:
        raise ModelError(
            f"{fields.path(name)} {outer!r} and {rope.path(name)} {inner!r} contradict"
        )
    return outer if inner is None else inner


def _read_llama3(rope: RopeConfig, fields: Fields) -> RopeConfig:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        raise ModelError(
            f"{fields.path('high_freq_factor')} must exceed `low_freq_factor`, got {high} and {low}"
        )
    return dataclasses.replace(rope, low_freq_factor=low, high_freq_factor=high)


def _read_yarn(rope: RopeConfig, fields: Fields) -> RopeConfig:
    return dataclasses.replace(
        rope,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        mscale=fields.number("mscale", None, zero=True),
        mscale_all_dim=fields.number("mscale_all_dim", None, zero=True),
        attention_factor=fields.number("attention_factor", None),
        truncate=fields.flag("truncate", True),
    )


def inverse_frequencies(
    rope: RopeConfig, head_dim: int
) -> tuple[Float[np.ndarray, " half"], float]:
    """Radians a position for each pair of channels, and the factor on the rotated q and k."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    # NumPy's own float32 power is off by a last bit where PyTorch's is not.
    wavelengths = np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)
    if rope.kind == "yarn":
        return _yarn(rope, wavelengths, head_dim), _yarn_attention_factor(rope)
    frequencies = 1.0 / wavelengths
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    return frequencies.astype(np.float32), 1.0


def _llama3(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Stretch the long wavelengths, keep the short ones, blend between."""
    wavelengths = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (rope.original_context / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = np.where(wavelengths > rope.original_context / low, frequencies / rope.factor, blended)
    return np.where(wavelengths < rope.original_context / high, frequencies, scaled)


def _yarn(rope: RopeConfig, wavelengths: np.ndarray, head_dim: int) -> np.ndarray:
    """Blend stretched and plain frequencies by how often a channel turns in the old context."""

    def channel(turns: float) -> float:
        period = rope.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(period) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if high == low else high
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = 1 - np.clip(ramp, 0, 1)
    return (1.0 / (rope.factor * wavelengths)) * (1 - keep) + (1.0 / wavelengths) * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rotation(
    positions: Int[Array, "B T"], rope: RopeConfig, head_dim: int
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosine and sine of every angle, times the attention factor; once for all layers."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies)[None, None]
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x: Float[Array, "B T H D"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Float[Array, "B T H D"]:
    """Turn channel ``i`` with channel ``i + D/2`` (the convention of the Hugging Face layout)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
