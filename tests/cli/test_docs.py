"""What the README and the docs tell a reader to type works."""

import pathlib
import re
import shlex

import pytest

from kvjax.command.calibrate_options import CalibrateConfig, calibrate_parser
from kvjax.command.decode_options import DecodeConfig, decode_parser
from kvjax.command.options import parse

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: pathlib.Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


COMMANDS = {
    "kvjax.decode": (DecodeConfig, decode_parser),
    "kvjax.calibrate": (CalibrateConfig, calibrate_parser),
}


def commands() -> list[str]:
    texts = [line for page in PAGES for block in blocks(page, "") for line in block.splitlines()]
    lines = [re.sub(r"^\$ |\s*(#|<).*$", "", line) for line in texts]
    return [line for line in lines if line.startswith(tuple(f"python -m {c} " for c in COMMANDS))]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_python_in_the_docs_runs(page, model, capsys):
    for block in blocks(page, "python"):
        names: dict = {}
        # Blocks of a page build on the first one's model.
        opening = 'import kvjax\nlm = kvjax.load("path/to/model")\n'
        exec((opening + block).replace("path/to/model", str(model)), names)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", commands())
def test_commands_in_the_docs_parse(command):
    name, *flags = shlex.split(command)[2:]
    table, parser = COMMANDS[name]
    config, _ = parse(table, parser(), flags)
    assert isinstance(config, table)


def test_there_are_commands_to_check():
    assert len(commands()) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
