"""One table of options, filled from a YAML file and from flags, which win.

The table is a frozen dataclass whose fields are made by ``option``. A field's type says what its
value may be: ``str``, ``int``, ``float``, ``bool``, a ``Literal`` of strings, any of these or None,
or ``tuple[str, ...]``, whose flag may be given several times.
"""

import argparse
import dataclasses
import difflib
import math
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.command.yaml_file import read_yaml
from kvjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Option:
    """What is known of an option beside its type and default.

    Attributes:
        help: one line for ``--help``.
        flags: spellings beside ``--its-name``.
        group: options of one group are alternatives: one at most is given, and one given as a flag
            replaces any of the file.
        minimum: the smallest allowed number, or the bound that it must exceed if ``exclusive``.
        maximum: the largest allowed number.
        joined: of a text: a file may also hold a number, or a list, which is joined by commas.
        blank: of a text: it may be empty. A shell gives an empty text for a variable that is not
            set, which must not be taken for the default.
    """

    help: str
    flags: tuple[str, ...] = ()
    group: str | None = None
    minimum: float | None = None
    exclusive: bool = False
    maximum: float | None = None
    joined: bool = False
    blank: bool = False


def option(default: Any, help: str, *flags: str, **bounds: Any) -> Any:
    """A field of an options table; the rest as in ``Option``."""
    return dataclasses.field(default=default, metadata={"option": Option(help, flags, **bounds)})


@dataclasses.dataclass(frozen=True)
class Entry:
    """One option of a table, resolved."""

    name: str
    default: Any
    type: type
    choices: tuple[str, ...] | None
    optional: bool
    option: Option

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def entries(table: type) -> dict[str, Entry]:
    """The options of a table by name."""
    hints = typing.get_type_hints(table)
    return {f.name: _entry(f, hints[f.name]) for f in dataclasses.fields(table)}


def _entry(field: dataclasses.Field, hint: Any) -> Entry:
    optional = types.NoneType in typing.get_args(hint)
    if optional:
        (hint,) = (kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else None
    kind = str if choices else typing.get_origin(hint) or hint
    return Entry(field.name, field.default, kind, choices, optional, field.metadata["option"])


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing a usage text and leaving."""

    def error(self, message: str) -> typing.NoReturn:
        raise UsageError(f"{message} (--help lists every flag)")


def make_parser(table: type, **settings: Any) -> argparse.ArgumentParser:
    """A parser with a flag for every option; only those given appear in its result."""
    parser = _Parser(allow_abbrev=False, argument_default=argparse.SUPPRESS, **settings)
    for entry in entries(table).values():
        short = [flag for flag in entry.option.flags if not flag.startswith("--")]
        long = [flag for flag in entry.option.flags if flag.startswith("--")]
        kind: dict[str, Any] = {"type": entry.type, "choices": entry.choices}
        if entry.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        elif entry.type is tuple:
            kind = {"action": "append", "metavar": "TEXT"}
        elif entry.choices is None:
            kind["metavar"] = {str: "TEXT", int: "N", float: "X"}[entry.type]
        parser.add_argument(*short, entry.flag, *long, dest=entry.name, help=_help(entry), **kind)
    return parser


def _help(entry: Entry) -> str:
    text = entry.option.help.replace("%", "%%")
    shown = entry.default is not None and entry.default is not False and entry.default != ()
    return f"{text} (default: {entry.default})" if shown else text


def read_options(table: type, path: str) -> dict[str, Any]:
    """The options that a YAML file gives.

    Raises:
        UsageError: the file cannot be read, or has an unknown key or a value of the wrong type.
    """
    return typed_options(entries(table), read_yaml(path), path)


def typed_options(
    known: Mapping[str, Entry], given: Mapping[Any, Any], source: str
) -> dict[str, Any]:
    """The values of options by name, as a YAML file gives them; ``source`` is for messages.

    Raises:
        UsageError: an unknown key or a value of the wrong type.
    """
    values = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise UsageError(f"{source}: unknown key {key!r}; {hint}")
        values[name] = _typed(known[name], value, source)
    return values


def _typed(entry: Entry, value: Any, path: str) -> Any:
    if value is None and entry.optional:
        return None
    if entry.type is float and type(value) is int and abs(value) < 2**1023:
        return float(value)
    if entry.option.joined:
        items = value if isinstance(value, list) and value else [value]
        if all(type(item) in (str, int, float) for item in items):
            return ",".join(map(str, items))
    if entry.type is tuple:
        items = value if isinstance(value, list) else [value]
        if all(type(item) is str for item in items):
            return tuple(items)
    if type(value) is entry.type and (entry.choices is None or value in entry.choices):
        return value
    kinds = {str: "text (quote it if it looks like a number)", int: "a whole number"}
    kinds |= {float: "a number", bool: "true or false", tuple: "text or a list of texts"}
    wanted = f"one of {', '.join(entry.choices)}" if entry.choices else kinds[entry.type]
    raise UsageError(f"{path}: {entry.name} must be {wanted}, got {value!r}")


def merge[Table](table: type[Table], file: Mapping[str, Any], flags: Mapping[str, Any]) -> Table:
    """The options of the file with those of the flags over them, checked.

    Raises:
        UsageError: a number out of its bounds, or two options that exclude each other.
    """
    known = entries(table)
    given = [name for name, value in flags.items() if value is not False]
    replaced = {known[name].option.group for name in given} - {None}
    kept = {k: v for k, v in file.items() if known[k].option.group not in replaced}
    config = table(**{**kept, **flags})
    for entry in known.values():
        value = getattr(config, entry.name)
        if entry.type is str and value == "" and not entry.option.blank:
            raise UsageError(f"{entry.flag} is empty: leave it out, or give it a value")
        _check_bounds(entry, value)
    _check_groups(known.values(), config)
    return config


def _check_bounds(entry: Entry, value: Any) -> None:
    if entry.type not in (int, float) or value is None:
        return
    bounds = entry.option
    low = -math.inf if bounds.minimum is None else bounds.minimum
    high = math.inf if bounds.maximum is None else bounds.maximum
    # A whole number may be beyond what a float can hold.
    inside = low <= value <= high and (entry.type is int or math.isfinite(value))
    if inside and not (bounds.exclusive and value == low):
        return
    limits = [
        f"{words} {bound}"
        for words, bound in (
            ("above" if bounds.exclusive else "at least", bounds.minimum),
            ("at most", bounds.maximum),
        )
        if bound is not None
    ]
    raise UsageError(f"{entry.flag} must be {' and '.join(limits) or 'finite'}, got {value}")


def _check_groups(known: typing.Iterable[Entry], config: Any) -> None:
    given: dict[str, list[str]] = {}
    for entry in known:
        if entry.option.group and getattr(config, entry.name) not in (None, False):
            given.setdefault(entry.option.group, []).append(entry.flag)
    for flags in given.values():
        if len(flags) > 1:
            raise UsageError(f"{' and '.join(flags)} exclude each other: give one of them")


def parse[Table](
    table: type[Table], parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[Table, argparse.Namespace]:
    """Fill a table from ``argv`` and the file that its ``--config`` names.

    Returns:
        The options, and what ``argv`` gave for the parser's other flags.
    """
    known = entries(table)
    words = sys.argv[1:] if argv is None else argv
    given = vars(parser.parse_args(_negatives_joined(words, known)))
    flags = {
        name: tuple(value) if known[name].type is tuple else value
        for name, value in given.items()
        if name in known
    }
    rest = argparse.Namespace(**{n: v for n, v in given.items() if n not in known})
    path = getattr(rest, "config", None)
    file = {} if path is None else read_options(table, path)
    return merge(table, file, flags), rest


def _negatives_joined(argv: Sequence[str], known: Mapping[str, Entry]) -> list[str]:
    """``--flag -1,0`` as ``--flag=-1,0``, which argparse does not take for another flag."""
    flags = {entry.flag for entry in known.values() if entry.option.joined}
    words: list[str] = []
    for word in argv:
        if words and words[-1] in flags and re.match(r"-\d", word):
            words[-1] += "=" + word
        else:
            words.append(word)
    return words
