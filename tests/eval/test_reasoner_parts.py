"""What eval/reasoner.sh has the reasoner judge can be run."""

import pathlib
import re
import subprocess

import pytest

from kvjax.eval.problems import reasoner_group
from kvjax.eval.reasoning import ReasoningConfig
from kvjax.eval.recipes import Work, read_recipes, settle, shape_of

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ReasoningConfig(
    model=str(ROOT / "eval/models/reasoner"),
    tasks="reasoner",
    recipes=str(ROOT / "eval/reasoner.yaml"),
)
LEVELS = (1000, 2000, 4000)


@pytest.fixture(scope="module")
def parts() -> list[tuple[int, list[str]]]:
    """The level and the recipes of every part, in their order."""
    command = ["bash", str(ROOT / "eval/reasoner.sh"), "nowhere", "list"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = [one.name for one in read_recipes(CONFIG)]
    found = []
    for line in said.splitlines():
        level, only = line.split(" ", 1)
        found.append((int(level), [name for name in names if re.fullmatch(only, name)]))
    return found


def test_every_part_names_recipes_and_none_twice(parts):
    assert all(names for _, names in parts)
    done = [(level, name) for level, names in parts for name in names]
    assert len(set(done)) == len(done)
    assert {name for _, name in done} == {one.name for one in read_recipes(CONFIG)}
    assert parts[:3] == [(level, ["full", "last 256"]) for level in LEVELS]


def test_the_sections_of_the_page_name_recipes_too():
    script = (ROOT / "eval/reasoner.sh").read_text()
    names = [one.name for one in read_recipes(CONFIG)]
    sections = re.findall(r"^    gather \w+ '(.*)'$", script, re.MULTILINE)
    assert len(sections) == 5
    for only in sections:
        assert sum(re.fullmatch(only, name) is not None for name in names) > 10
    shown = {name for only in sections for name in names if re.fullmatch(only, name)}
    assert {*names} - shown == {"full", "last 256"}


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_every_part_can_be_run_at_its_level(parts, level, monkeypatch):
    """Of each something; all but a few at all."""
    monkeypatch.setattr("kvjax.eval.recipes.device_memory", lambda: 139 * 2**30)
    group = reasoner_group(level, 256, 0, CONFIG.limit)
    work = Work(
        [len(one.prompt) for one in group.problems],
        group.max_new_tokens,
        True,
        group.answer_tokens,
    )
    shape, named = shape_of(CONFIG), {one.name: one for one in read_recipes(CONFIG)}
    count, refused = 0, []
    for at, names in parts:
        if at == level:
            none = [name for name in names if settle(named[name], shape, work, 128).refused]
            count, refused = count + len(names), refused + none
            assert len(none) < len(names) or level == 1000, names
    assert len(refused) <= {1000: 11, 2000: 3, 4000: 1}[level] and count > 100
