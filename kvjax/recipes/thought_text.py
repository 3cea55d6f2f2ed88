"""The parts of ``thinkv`` from texts, as a command line or a file has them."""

from typing import Any

from kvjax.codecs import kv_codec
from kvjax.errors import UsageError
from kvjax.thoughts import KINDS, Given, Retention, Segmenter, Sparsity
from kvjax.thoughts.calibration import Calibration, by_sparsity

SEGMENTER_FIELDS = ("calibration", "kinds", "segment_tokens", "covers", "corrected")
RETENTION_FIELDS = ("schedule", "chooser", "shared", "at", "forget")
THOUGHT_FIELDS = {*SEGMENTER_FIELDS, *RETENTION_FIELDS, "paper", "prompt_budget", "thought_codecs"}
"""What ``parse`` takes for method "thinkv" alone."""


def thinkv_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``thinkv`` from those of ``parse``; other texts are left to be read.

    Raises:
        UsageError: beginning with the field that is wrong.
    """
    fields = dict(fields)
    if fields.get("selector") is not None and fields.get("prompt_budget") is None:
        raise UsageError("selector is for the prompt with method thinkv: give a prompt_budget too")
    parts = {name: fields.pop(name) for name in SEGMENTER_FIELDS if name in fields}
    segmenter = _segmenter(parts, paper=fields.get("paper", False))
    if segmenter is not None:
        fields["segmenter"] = segmenter
    kept = {name: fields.pop(name) for name in RETENTION_FIELDS if name in fields}
    if fields.get("budget") == "all":
        if unused := sorted(kept):
            raise UsageError(f"{unused[0]} has no effect with budget all, which evicts nothing")
        fields["budget"] = None
    elif kept:
        if isinstance(kept.get("schedule"), str):
            kept["schedule"] = _schedule(kept["schedule"])
        shared = {"shared": True} if fields.get("paper") else {}
        fields["retention"] = Retention(**shared | kept)
    if "codec" in fields:
        fields["thought_codecs"] = _thought_codecs(fields.pop("codec"))
    return fields


def _segmenter(parts: dict[str, Any], *, paper: bool) -> Segmenter | None:
    """None if nothing says that it is to be another than the method's own."""
    calibration, kinds, corrected = (
        parts.get(name) for name in ("calibration", "kinds", "corrected")
    )
    if calibration is not None and kinds is not None:
        raise UsageError("kinds and calibration exclude each other: give one of them")
    common = {
        ours: parts[name]
        for name, ours in (("segment_tokens", "every"), ("covers", "covers"))
        if name in parts
    }
    plain = Given(kinds or "R", **common)
    if isinstance(calibration, str):
        try:
            calibration = Calibration.load(calibration)
        except UsageError as error:
            raise UsageError(f"calibration: {error}") from error
    if calibration is not None:
        told = by_sparsity(plain, calibration, not paper if corrected is None else corrected)
        if isinstance(told, Sparsity):
            return told
    if corrected is not None:
        raise UsageError("corrected has no effect without a calibration that tells thoughts apart")
    return None if kinds is None and not common else plain


def _schedule(text: str) -> tuple[int, ...]:
    numbers = [item.strip() for item in text.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise UsageError(f"schedule must be numbers of tokens, as 64,32,16,8,4, got {text!r}")
    return tuple(map(int, numbers))


def _thought_codecs(text: str) -> tuple[str, str, str]:
    """ "R:4,E:4,T:2", or one codec for all."""
    if ":" not in text:
        return (read_codec("codec", text),) * 3
    pairs = dict.fromkeys(KINDS)
    for item in text.split(","):
        kind, _, codec = (part.strip() for part in item.partition(":"))
        if kind not in pairs or pairs[kind] is not None:
            raise UsageError(
                f"codec must name each of {', '.join(KINDS)} once, as in R:4,E:4,T:2, got {text!r}"
            )
        pairs[kind] = read_codec("codec", codec)
    if None in pairs.values():
        raise UsageError(f"codec must name all of {', '.join(KINDS)}, got {text!r}")
    return tuple(pairs.values())


def read_codec(field: str, text: str) -> str:
    """A codec's full name.

    Raises:
        UsageError: there is none of that name; begins with the field.
    """
    try:
        return kv_codec(text.strip()).name
    except UsageError as error:
        raise UsageError(f"{field}: {error}") from error
