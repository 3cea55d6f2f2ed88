"""The calibration of one model: which layers tell thoughts apart, and where the borders are."""

import dataclasses
import importlib.resources
import json
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvjax.errors import UsageError
from kvjax.files import write_atomically
from kvjax.thoughts.segmenters import Segmenter, Sparsity

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel
    from kvjax.thoughts.density import Fit

COMMAND = "python -m kvjax.calibrate --model M --prompts FILE.jsonl --out calibration.json"
FORMAT = 1
"""Of the file; another number is refused."""
LARGEST = 1 << 20
"""Bytes of a file that can still be a calibration."""

_FINGERPRINT = re.compile("[0-9a-f]{64}")
_SHOWN = 12  # characters of a fingerprint in a message


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What the thought decomposition of ThinKV needs to know of a model.

    Attributes:
        fingerprint: of the model's config and weights.
        model: its name, for people.
        layers: those whose sparsity is averaged; empty if there are no thresholds.
        thresholds: execution below the first, transition above the second, reasoning between; None
            if no layer tells three kinds apart, which leaves one kind of thought.
        trimodal: for each layer of the model, the share of prompts on which it showed three modes.
        prompts: how many took part.
        tokens: of their answers.
        settings: how it was made, pairs of a name and a plain value.

    Raises:
        UsageError: a field that cannot be; the message begins with its name.
    """

    fingerprint: str
    model: str
    layers: tuple[int, ...]
    thresholds: tuple[float, float] | None
    trimodal: tuple[float, ...]
    prompts: int
    tokens: int
    settings: tuple[tuple[str, str | int | float | bool | None], ...]

    def __post_init__(self):
        _check(self)

    @classmethod
    def of(
        cls, fit: "Fit", *, fingerprint: str, model: str, settings: Mapping[str, Any]
    ) -> "Calibration":
        """The calibration that a fit leads to."""
        return cls(
            fingerprint=fingerprint,
            model=model,
            layers=fit.layers,
            thresholds=fit.thresholds,
            trimodal=fit.trimodal,
            prompts=len(fit.densities),
            tokens=fit.tokens,
            settings=tuple(settings.items()),
        )

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Calibration":
        """Read and check a file.

        Raises:
            UsageError: it cannot be read or is no calibration; names the file and the field.
        """
        try:
            with open(path, "rb") as file:
                content = file.read(LARGEST + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"cannot read {os.fspath(path)}: {reason}") from error
        try:
            return cls(**_fields(content))
        except UsageError as error:
            raise UsageError(f"{os.fspath(path)}: {error}; make it anew: {COMMAND}") from error

    @classmethod
    def shipped(cls, fingerprint: str) -> "Calibration | None":
        """The one that comes with kvjax for the model of this fingerprint, None if none does."""
        folder = importlib.resources.files("kvjax.thoughts") / "calibrations"
        with importlib.resources.as_file(folder) as real:
            found = map(cls.load, sorted(real.glob("*.json")))
            return next((one for one in found if one.fingerprint == fingerprint), None)

    def save(self, path: str | os.PathLike) -> None:
        """Write the file, whole or not at all.

        Raises:
            UsageError: it cannot be written.
        """
        fields = {"format": FORMAT} | dataclasses.asdict(self) | {"settings": dict(self.settings)}
        try:
            lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in fields.items())
            write_atomically(pathlib.Path(path), f"{{\n{lines}\n}}\n".encode())
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"cannot write {os.fspath(path)}: {reason}") from error

    def check(self, lm: "LanguageModel") -> None:
        """Refuse any model but the one that was calibrated.

        Raises:
            UsageError: it is another one.
        """
        self.for_model(lm.fingerprint, lm.config.num_layers)

    def for_model(self, fingerprint: str, num_layers: int) -> None:
        """The same, of a model whose weights need not be loaded.

        Raises:
            UsageError: it is another one.
        """
        if fingerprint != self.fingerprint:
            raise UsageError(
                f"the calibration is for {self.model} (fingerprint {self.fingerprint[:_SHOWN]}) "
                f"and not for this model ({fingerprint[:_SHOWN]}); make one: {COMMAND}"
            )
        if num_layers != len(self.trimodal):
            raise UsageError(
                f"the calibration is for a model of {len(self.trimodal)} layers and this one has "
                f"{num_layers}; make one: {COMMAND}"
            )


def by_sparsity(segmenter: Segmenter, found: Calibration, corrected: bool) -> Segmenter:
    """The same segments, told apart as a calibration says; as before where it found no way."""
    if found.thresholds is None:
        return segmenter
    return Sparsity(
        found.layers,
        found.thresholds,
        every=segmenter.every,
        covers=segmenter.covers,
        corrected=corrected,
        fingerprint=found.fingerprint,
    )


def _fields(content: bytes) -> dict[str, Any]:
    """The arguments that a file holds, lists as tuples; their values are not checked here."""
    if len(content) > LARGEST:
        raise UsageError(f"no calibration: more than {LARGEST} bytes")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not readable as JSON ({error})") from error
    if not isinstance(found, dict):
        raise UsageError(f"expected a JSON object, got {type(found).__name__}")
    if found.pop("format", None) != FORMAT:
        raise UsageError(f"format must be {FORMAT}")
    names = {field.name for field in dataclasses.fields(Calibration)}
    if wrong := sorted(names ^ found.keys()):
        raise UsageError(f"{wrong[0]} is {'missing' if wrong[0] in names else 'unknown'}")
    if not isinstance(found["settings"], dict):
        raise UsageError(f"settings must be an object, got {found['settings']!r}")
    found["settings"] = tuple(found["settings"].items())
    return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}


def _check(found: Calibration) -> None:
    def require(name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise UsageError(f"{name} must be {wanted}, got {getattr(found, name)!r:.80}")

    shares, layers, thresholds = found.trimodal, found.layers, found.thresholds
    text = isinstance(found.fingerprint, str)
    require(
        "fingerprint",
        text and bool(_FINGERPRINT.fullmatch(found.fingerprint)),
        "64 hexadecimal digits",
    )
    require("model", isinstance(found.model, str), "text")
    require(
        "trimodal",
        isinstance(shares, tuple) and len(shares) > 0 and all(_within(s, 0, 1) for s in shares),
        "a number from 0 to 1 for each layer",
    )
    require(
        "layers",
        isinstance(layers, tuple)
        and all(type(layer) is int and 0 <= layer < len(shares) for layer in layers)
        and len(set(layers)) == len(layers),
        f"distinct whole numbers from 0 to {len(shares) - 1}",
    )
    require(
        "thresholds",
        thresholds is None
        or (
            isinstance(thresholds, tuple)
            and len(thresholds) == 2
            and all(_within(theta, 0, 1) for theta in thresholds)
            and thresholds[0] < thresholds[1]
        ),
        "two ascending numbers from 0 to 1, or null",
    )
    require(
        "layers",
        bool(layers) == (thresholds is not None),
        "some with thresholds and none without",
    )
    require("prompts", type(found.prompts) is int and found.prompts > 0, "a whole number above 0")
    require("tokens", type(found.tokens) is int and found.tokens > 0, "a whole number above 0")
    settings = found.settings
    require(
        "settings",
        isinstance(settings, tuple)
        and all(isinstance(pair, tuple) and len(pair) == 2 for pair in settings)
        and all(isinstance(key, str) and _is_plain(value) for key, value in settings),
        "names with plain values",
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (str, int))


def _within(value: Any, low: float, high: float) -> bool:
    """NaN is not."""
    return type(value) in (int, float) and low <= value <= high
