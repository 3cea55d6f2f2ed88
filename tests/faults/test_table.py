"""docs/faults.md names tests that exist."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TABLE = ROOT / "docs/faults.md"
ROW = re.compile(r"^\|([^|]+)\|([^|]+)\| `([\w/.]+)::(\w+)` \|$")


def rows() -> list[str]:
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("|")]
    return [line for line in lines if not line.startswith(("| kind of fault |", "|---"))]


@functools.cache
def defined(path: pathlib.Path) -> set[str]:
    """Names of the functions that pytest would take for tests."""
    body = ast.parse(path.read_text()).body
    return {part.name for part in body if isinstance(part, ast.FunctionDef)}


@pytest.mark.parametrize("row", rows())
def test_every_kind_of_fault_has_its_test(row):
    kind, here, path, name = ROW.match(row).groups()
    assert kind.strip() and here.strip()
    assert name.startswith("test_") and name in defined(ROOT / path)


def test_every_test_of_this_folder_is_in_the_table():
    named = {ROW.match(row)[4] for row in rows()}
    for path in pathlib.Path(__file__).parent.glob("test_*.py"):
        if path != pathlib.Path(__file__):
            assert {name for name in defined(path) if name.startswith("test_")} <= named
