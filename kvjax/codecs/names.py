"""Codecs by name."""

import dataclasses
import re

import jax.numpy as jnp

from kvjax.codecs.codec import Codec, KVCodec
from kvjax.errors import UsageError

WIDTHS = (2, 4, 8, 16)
ADVERTISED = (
    "bf16",
    "fp8",
    "int8",
    "int4",
    "int2",
    *(f"k{k}v{v}" for k in WIDTHS for v in WIDTHS if k != v),
    "nvfp4",
    "ternary",
    "ternary-absmax",
    "kivi4",
    "kivi2",
)
"""Names that ``kv_codec`` knows, beside plain widths ("4" for "int4") and "kivi2-g64"."""

_FLOAT16, _FLOAT8 = jnp.dtype(jnp.float16), jnp.dtype(jnp.float8_e4m3fn)
_PAPER_GROUP = 16
_FIELDS = {"mean": "center", "balance": "balance", "rotation": "rotate"}
_KIVI_GROUP = 32


def kv_codec(spec: str) -> KVCodec:
    """The codec that ``spec`` names, with what it adds or takes away.

    "+mean", "+balance", "-mean", "-balance" and "-rotation" may follow any name of one scale a
    token: "int4+mean+balance".

    * "bf16" (or "16") stores keys and values in the model's own dtype, whatever that is.
    * "fp8", "int8", "int4", "int2" (or "8", "4", "2") and "k4v2", with any of 2, 4, 8 and 16 bits
      for keys and for values: one scale for a token and head, rotated. A model with a key bias
      wants mean and balance as well.
    * "nvfp4" and "ternary": ThinKV's layouts, groups of 16 tokens of a channel for keys and of 16
      channels of a token for values. "ternary" keeps what exceeds 0.7 of the group's mean size;
      "ternary-absmax" rounds at half the largest and has a larger error.
    * "kivi4" and "kivi2": KIVI's, in groups of 32, or of 64 with "kivi2-g64".

    Raises:
        UsageError: for any other name.
    """
    name, changes = spec, {}
    while match := re.fullmatch(r"(.+)([+-])(mean|balance|rotation)", name):
        name = match[1]
        changes[_FIELDS[match[3]]] = match[2] == "+"
    codec = _named(name)
    if not changes:
        return codec
    if not codec.rotate:
        raise UsageError(f"{spec!r}: only codecs of one scale a token have a basis to change")
    return dataclasses.replace(codec, name=spec, **changes)


def _named(spec: str) -> KVCodec:
    if spec == "fp8":
        return _uniform(spec, *[Codec(spec, spec, 8, scale_dtype=_FLOAT16)] * 2)
    if spec == "nvfp4":
        return _by_group(Codec(spec, "e2m1", 4, scale_dtype=_FLOAT8), _PAPER_GROUP)
    if spec in ("ternary", "ternary-absmax"):
        rule = "absmax" if spec == "ternary-absmax" else "twn"
        codec = Codec(spec, "ternary", 2, scale_dtype=_FLOAT8, ternary_rule=rule)
        return _by_group(codec, _PAPER_GROUP)
    if kivi := re.fullmatch(r"kivi([24])(?:-g([1-9]\d{0,3}))?", spec):
        bits, group = int(kivi[1]), int(kivi[2] or _KIVI_GROUP)
        codec = Codec(spec, f"uint{bits}", bits, scale_dtype=_FLOAT16, zero=True)
        return _by_group(codec, group)
    if widths := re.fullmatch(r"k(2|4|8|16)v(2|4|8|16)", spec):
        return _of_widths(int(widths[1]), int(widths[2]))
    if width := re.fullmatch(r"(?:int)?([248])|(?:bf)?(16)", spec):
        return _of_widths(*[int(width[1] or width[2])] * 2)
    raise UsageError(
        f"no codec is named {spec!r}; there are bf16, fp8, int8, int4, int2 (or 16, 8, 4, 2), "
        "k4v2 and the like with 2, 4, 8 or 16 bits each, nvfp4, ternary, ternary-absmax, kivi4, "
        "kivi2, kivi2-g64 and the like for another group, and int4+mean, int4+balance, "
        "int4-rotation and the like for another basis"
    )


def _of_widths(k_bits: int, v_bits: int) -> KVCodec:
    k, v = (
        Codec("bf16", "float", 16)
        if bits == 16
        else Codec(f"int{bits}", f"int{bits}", bits, scale_dtype=_FLOAT16)
        for bits in (k_bits, v_bits)
    )
    return _uniform(k.name if k == v else f"k{k_bits}v{v_bits}", k, v)


def _uniform(name: str, k: Codec, v: Codec) -> KVCodec:
    rotate = (k.fmt, v.fmt) != ("float", "float")
    return KVCodec(name, k, v, rotate=rotate, center=False, balance=False)


def _by_group(codec: Codec, group: int) -> KVCodec:
    k = dataclasses.replace(codec, tokens=group, channels=1)
    v = dataclasses.replace(codec, tokens=1, channels=group)
    return KVCodec(codec.name, k, v, rotate=False, center=False, balance=False)
