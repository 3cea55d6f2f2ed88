"""YAML as its version 1.2 reads it: ``on`` is a word, ``1e-3`` a number, ``2024-01-01`` a text."""

import re
from typing import Any

import yaml

from kvjax.command.files import read_text
from kvjax.errors import UsageError

_CORE = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}
"""Tag, the pattern of its plain scalars and the characters that these begin with."""


class _Loader(yaml.SafeLoader):
    """The core schema of YAML 1.2; a key that stands twice is an error."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own attribute)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what either version of YAML would take for something else than text."""


for _tag, (_pattern, _first) in _CORE.items():
    _regexp = re.compile(rf"^(?:{_pattern})$")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _regexp, _first)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _regexp, _first)
_Loader.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node))
)
_Loader.add_constructor(
    "tag:yaml.org,2002:float",
    lambda loader, node: float(re.sub(r"\.(?=[a-zA-Z])", "", loader.construct_scalar(node))),
)


def read_yaml(path: str) -> dict[Any, Any]:
    """The mapping that a file holds; an empty file holds none.

    Raises:
        UsageError: the file cannot be read or is no mapping.
    """
    content = load_yaml(path, "--config")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold `key: value` lines, got {type(content).__name__}")
    return content


def load_yaml(path: str, flag: str) -> Any:
    """What a file holds, None if it is empty.

    Raises:
        UsageError: the file cannot be read; ``flag`` named it.
    """
    text = read_text(path, flag)
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except (KeyError, AttributeError) as error:  # what PyYAML makes of `!!bool maybe`
        raise UsageError(f"{path} is not valid YAML: a value is at odds with its tag") from error


def dump_yaml(values: dict[str, Any]) -> str:
    """Text that ``read_yaml`` reads back to ``values``."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**9)
