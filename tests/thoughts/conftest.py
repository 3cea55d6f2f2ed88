"""The small model of the command's tests, and the calibrate command in this process."""

import json
import pathlib

import pytest

from kvjax.calibrate import main
from tests.cli.conftest import Outcome, model

__all__ = ["model"]

WORDS = ("hello", "what is it?", "seven by nine", "go on")


@pytest.fixture
def prompts(tmp_path) -> pathlib.Path:
    """A file of four prompts."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "prompt": word} for i, word in enumerate(WORDS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def calibrate(model, capsys, monkeypatch):
    """Run the command on the small model."""
    # The folder for compiled programs is a setting of the whole process.
    monkeypatch.setattr("kvjax.command.calibrate_run.keep_compiled_programs", lambda: None)

    def run(*argv: object) -> Outcome:
        code = main(["--model", str(model), *map(str, argv)])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run
