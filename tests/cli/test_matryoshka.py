"""The command that trains MatryoshkaKV's projections."""

import json

import numpy as np
import pytest

from kvjax.train.matryoshka.__main__ import main
from kvjax.train.matryoshka.loop import PATH

RATES = ["--target-rate", "0.5", "0.75"]


@pytest.fixture
def train(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvjax.train.matryoshka.__main__.keep_compiled_programs", lambda: None)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(np.random.default_rng(0).choice(["tree", "of", "whale"], 400)))

    def run(*argv: str) -> tuple[int, str]:
        named = ["--model", str(model), "--data", str(text), "--out", str(tmp_path / "out"), *RATES]
        code = main([*named, "--seq-len", "16", "--batch-size", "4", "--grad-accum", "1", *argv])
        captured = capsys.readouterr()
        assert captured.out == ""
        return code, captured.err

    return run


@pytest.mark.slow
def test_a_run_says_what_each_rate_costs_and_goes_on_from_a_search(train, tmp_path):
    code, said = train("--steps", "2", "--drops", "4")
    assert code == 0, said
    assert "target rate 0.5: held-out cross-entropy" in said and "at a rate of 0.750" in said
    record = json.loads((tmp_path / "out" / "matryoshka.json").read_bytes())
    assert [point["target_rate"] for point in record["points"]] == [0.5, 0.75]
    code, said = train("--steps", "2", "--drops", "4")
    assert code == 2 and "holds a run already" in said
    code, said = train("--steps", "3", "--drops", "4", "--resume")
    assert code == 2 and "steps 2 and not 3" in said
    (tmp_path / "out" / PATH).write_text("[0, 99999]")
    code, said = train("--steps", "2", "--drops", "4", "--resume")
    assert code == 2 and "search.json cannot be used" in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--target-rate", "0.01"], "--target-rate must be from 1/8 to 1, got 0.01"),
        (["--kl-weight", "-1"], "--kl-weight must be at least 0"),
        (["--seq-len", "99999"], "--seq-len 99999 exceeds the model's context"),
        (["--batch-size", "3"], "--batch-size 3 must be a multiple of"),
        (["--data", "nowhere.txt"], "--data: cannot read nowhere.txt"),
        (["--out", __file__], "is no folder"),
    ],
)
def test_what_cannot_work_is_refused_before_weights_load(train, monkeypatch, argv, message):
    monkeypatch.setattr("kvjax.load", lambda *args, **options: pytest.fail("loaded"))
    code, said = train(*argv)
    assert code in (2, 4) and message in said
