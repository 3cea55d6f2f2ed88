"""What the README and the docs tell a reader to type works."""

import importlib.util
import json
import pathlib
import re
import shlex

import pytest

from kvjax.command.calibrate_options import CalibrateConfig, calibrate_parser
from kvjax.command.options import parse
from kvjax.command.train_dynakv_options import TrainDynaKVConfig, train_dynakv_parser
from kvjax.eval.choice import ChoiceConfig, choice_parser
from kvjax.eval.perplexity import PerplexityConfig, perplexity_parser
from kvjax.eval.reasoning import ReasoningConfig, reasoning_parser
from kvjax.eval.report import ReportConfig, report_parser
from kvjax.eval.retrieval import RetrievalConfig, retrieval_parser
from kvjax.train.corpus import parse as parse_corpus
from kvjax.train.matryoshka.__main__ import parse as parse_matryoshka
from kvjax.train.matryoshka.__main__ import settings_of

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: pathlib.Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    return [block for name, block in found if name == language]


def slow_but_of_the_readme(found: list) -> list:
    """Parameters: what the README shows runs in the quick tests, the rest in the slow ones."""
    readme = (ROOT / "README.md").read_text()
    quick = [one for one in found if str(one) in readme or one == ROOT / "README.md"]
    return [one if one in quick else pytest.param(one, marks=pytest.mark.slow) for one in found]


def commands(module: str) -> list[str]:
    texts = [line for page in PAGES for block in blocks(page, "") for line in block.splitlines()]
    lines = [re.sub(r"^\$ |\s*(#|<).*$", "", line) for line in texts]
    return [line for line in lines if line.startswith(f"python -m {module} ")]


def mentioned() -> list[str]:
    """Commands inside a sentence."""
    return [
        command
        for page in PAGES
        for command in re.findall(r"`python -m ([^`]+)`", page.read_text())
    ]


@pytest.mark.parametrize(
    "page",
    slow_but_of_the_readme([p for p in PAGES if blocks(p, "python")]),
    ids=lambda p: p.name,
)
def test_python_in_the_docs_runs(page, model, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "python"):
        names: dict = {}
        # Blocks of a page build on the first one's model.
        opening = 'import kvjax\nlm = kvjax.load("path/to/model")\n'
        exec((opening + block).replace("path/to/model", str(model)), names)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", slow_but_of_the_readme(commands("kvjax.decode")))
def test_commands_in_the_docs_run(command, decode, model, tmp_path, monkeypatch):
    """As they stand there, on the small model and for a few tokens."""
    monkeypatch.chdir(tmp_path)
    questions = [json.dumps({"prompt": text}) for text in ("Why?", "How?")]
    pathlib.Path("questions.jsonl").write_text("\n".join(questions))
    argv = shlex.split(command.replace("path/to/model", str(model)))[3:]
    if "--load-cache" in argv:  # what the command before it has saved
        at = argv.index("--load-cache")
        decode(*argv[:at], *argv[at + 2 :], "--max-new-tokens", "4")
    outcome = decode(*argv, "--max-new-tokens", "4", stdin=b"Why?")
    assert outcome.code == 0, outcome.err
    answers = pathlib.Path("answers.jsonl")
    said = answers.read_text() if answers.exists() else outcome.out
    assert len(said.splitlines()) >= (2 if "questions.jsonl" in command else 1)


@pytest.mark.parametrize("command", mentioned())
def test_commands_in_a_sentence_name_a_module_and_its_flags(command):
    module, *rest = command.split()
    # Benchmarks of text have some arguments in common.
    origins = (importlib.util.find_spec(name).origin for name in (module, "kvjax.eval.text"))
    source = "".join(pathlib.Path(origin).read_text() for origin in origins)
    for flag in (word for word in rest if word.startswith("--") and word != "--help"):
        assert f'"{flag}"' in source


PARSED = {
    "kvjax.calibrate": (CalibrateConfig, calibrate_parser),
    "kvjax.train_dynakv": (TrainDynaKVConfig, train_dynakv_parser),
    "kvjax.eval.choice": (ChoiceConfig, choice_parser),
    "kvjax.eval.perplexity": (PerplexityConfig, perplexity_parser),
    "kvjax.eval.reasoning": (ReasoningConfig, reasoning_parser),
    "kvjax.eval.report": (ReportConfig, report_parser),
    "kvjax.eval.retrieval": (RetrievalConfig, retrieval_parser),
}


@pytest.mark.parametrize("command", [line for module in PARSED for line in commands(module)])
def test_commands_in_the_docs_parse(command):
    _, _, module, *argv = shlex.split(command)
    table, parser = PARSED[module]
    config, _ = parse(table, parser(), argv)
    assert isinstance(config, table)


@pytest.mark.parametrize("command", commands("kvjax.train.matryoshka"))
def test_commands_of_a_baseline_parse(command):
    assert settings_of(parse_matryoshka(shlex.split(command)[3:])).target_rates


@pytest.mark.parametrize("command", commands("kvjax.train.corpus"))
def test_commands_of_a_corpus_parse(command):
    assert parse_corpus(shlex.split(command)[3:]).out


def test_there_are_commands_to_check():
    assert len(commands("kvjax.decode")) >= 10 and len(mentioned()) >= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
