"""Reading a parsed JSON object field by field, with errors that name the field and its value."""

import sys
from collections.abc import Collection, Mapping
from typing import Any

from kvjax.errors import ModelError

REQUIRED: Any = object()


class Fields:
    """The fields of one JSON object. A null counts as absent, as it does for transformers."""

    def __init__(self, values: Any, name: str = ""):
        if not isinstance(values, Mapping):
            what = f"`{name}`" if name else "the model config"
            raise ModelError(f"{what} must be a JSON object, got {values!r}")
        self._values = values
        self._prefix = f"{name}." if name else ""

    def __iter__(self):
        return (key for key, value in self._values.items() if value is not None)

    def path(self, name: str) -> str:
        """How errors call this field."""
        return f"`{self._prefix}{name}`"

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is, or the default; `REQUIRED` for a default makes absence an error."""
        value = self._values.get(name)
        if value is None and default is REQUIRED:
            raise ModelError(f"the model config lacks {self.path(name)}, which is needed here")
        return default if value is None else value

    def child(self, name: str) -> "Fields":
        """A field that is an object itself."""
        return Fields(self.get(name, REQUIRED), f"{self._prefix}{name}")

    def count(
        self,
        name: str,
        default: Any = REQUIRED,
        minimum: int = 1,
        maximum: int | None = None,
    ) -> Any:
        """A whole number of at least ``minimum``, and of at most ``maximum`` if that is given."""
        value = self.get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ModelError(f"{self.path(name)} must be an integer >= {minimum}, got {value!r}")
        if maximum is not None and value > maximum:
            raise ModelError(f"{self.path(name)} must be at most {maximum}, got {value}")
        return value

    def number(self, name: str, default: Any = REQUIRED, *, zero: bool = False) -> Any:
        """A finite float above zero (or zero itself where ``zero`` allows it)."""
        value = self.get(name, default)
        if value is default:
            return value
        known = isinstance(value, int | float) and not isinstance(value, bool)
        if not known or not (value >= 0 if zero else value > 0) or value > sys.float_info.max:
            bound = "at least 0" if zero else "above 0"
            raise ModelError(f"{self.path(name)} must be a finite number {bound}, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path(name)} must be true or false, got {value!r}")
        return value

    def choice(self, name: str, allowed: Collection[str], default: Any = REQUIRED) -> str:
        """One of a few words."""
        value = self.get(name, default)
        if value not in tuple(allowed):
            names = ", ".join(allowed)
            raise ModelError(f"{self.path(name)} {value!r} is not supported (supported: {names})")
        return value

    def only(self, name: str, supported: Any) -> None:
        """Refuse any value but the one that the model code implements."""
        value = self.get(name)
        if value is not None and value != supported:
            want = "leaving it out" if supported is None else repr(supported)
            raise ModelError(f"{self.path(name)} {value!r} is not supported (supported: {want})")
