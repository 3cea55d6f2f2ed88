"""What the paper leaves open, as switches; a default is the reading that its formulas suggest."""

import dataclasses
from typing import Literal

from kvjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class SpectralSettings:
    """How keys and values are compressed.

    Attributes:
        gate: what decides a rank: each "token"'s own spectral state (the paper), one learned
            distribution a "layer" (W = 0), or nothing at all, which is "fixed" (both controls).
        key_rank: rank of every key with a "fixed" gate, or one of each layer.
        value_rank: the same for values.
        inverse: what rebuilds: the "inverse" of U (as the formula has it), a "free" matrix that
            starts there, or the transpose of a U that is kept "orthogonal".
        centre: what U starts from: the eigenvectors of the second "moment" (ours), those of the
            "covariance" without a mean in the formulas (their letter), or the covariance's with
            the "mean" taken off before and put back afterwards.
        keys: which keys are compressed where the model norms them: the "normed" ones, which only
            need their rotation, or the "raw" ones, normed after they are rebuilt.
        tau: a component is stored if its mask is above this.
        stored: what is stored of a component that is: the "plain" value (the formula) or the
            "masked" one, which training sees.
        rank_multiple: ranks are rounded up to multiples of this, and counted so.
        masks_own: whether a token sees its own key and value compressed, too.
        basis_learns_from_gate: whether the gate's input passes gradients on to U.
        tilt: how steeply the gate's bias rises with the rank at first: the soft rate starts near
            1 - 1 / tilt.

    Raises:
        UsageError: a value that cannot be, or ranks without a fixed gate; begins with the name.
    """

    gate: Literal["token", "layer", "fixed"] = "token"
    key_rank: int | tuple[int, ...] | None = None
    value_rank: int | tuple[int, ...] | None = None
    inverse: Literal["inverse", "free", "orthogonal"] = "inverse"
    centre: Literal["covariance", "moment", "mean"] = "moment"
    keys: Literal["normed", "raw"] = "normed"
    tau: float = 0.1
    stored: Literal["plain", "masked"] = "plain"
    rank_multiple: int = 1
    masks_own: bool = True
    basis_learns_from_gate: bool = True
    tilt: float = 20.0

    def __post_init__(self):
        for name in ("gate", "inverse", "centre", "keys", "stored"):
            allowed = type(self).__annotations__[name].__args__
            _require(name, getattr(self, name), getattr(self, name) in allowed, f"in {allowed}")
        for name in ("masks_own", "basis_learns_from_gate"):
            _require(name, getattr(self, name), type(getattr(self, name)) is bool, "true or false")
        _require("tau", self.tau, _number(self.tau) and 0 <= self.tau < 1, "from 0 to below 1")
        _require("tilt", self.tilt, _number(self.tilt) and 0 <= self.tilt <= 1e4, "from 0 to 1e4")
        multiple = self.rank_multiple
        _require("rank_multiple", multiple, _count(multiple), "a whole number above 0")
        for name in ("key_rank", "value_rank"):
            rank = getattr(self, name)
            if self.gate == "fixed":
                if isinstance(rank, list):  # as a record has it
                    object.__setattr__(self, name, tuple(rank))
                every = bool(_each(rank)) and all(map(_count, _each(rank)))
                _require(name, rank, every, "a whole number above 0 with a fixed gate")
            else:
                _require(name, rank, rank is None, f"left out with a gate by {self.gate}")

    def check_width(self, width: int, layers: int) -> None:
        """Refuse ranks that keys and values of ``width`` components in ``layers`` cannot have.

        Raises:
            UsageError: one is larger, or layers are missing; begins with its name.
        """
        for name in ("key_rank", "value_rank", "rank_multiple"):
            value = getattr(self, name)
            limit = f"at most {width}, the width of this model's keys"
            _require(name, value, value is None or max(_each(value)) <= width, limit)
            several = isinstance(value, tuple)
            _require(name, value, not several or len(value) == layers, f"one of {layers} layers")

    def ranks(self, layer: int) -> tuple[int | None, int | None]:
        """The fixed ranks of a layer's keys and values."""
        pair = self.key_rank, self.value_rank
        return tuple(rank[layer] if isinstance(rank, tuple) else rank for rank in pair)


def _require(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise UsageError(f"{name} must be {wanted}, got {value!r}")


def _each(value: object) -> tuple:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _number(value: object) -> bool:
    return type(value) in (int, float)


def _count(value: object) -> bool:
    return type(value) is int and value > 0
