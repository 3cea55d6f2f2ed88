"""Perplexities are those of the windows, by a computation of their own."""

import json
import math

import numpy as np
import pytest

import kvjax
from kvjax.eval import perplexity, windows
from tests.cli.conftest import model  # noqa: F401

WINDOW, STRIDE = 64, 24
TEXT = "".join(chr(32 + (7 * n * n + n // 5) % 95) for n in range(WINDOW + 4 * STRIDE + 5))
RECIPES = """
- method: full
- {name: tight, method: rkv, share: 1/16}
"""


@pytest.fixture
def measure(model, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr("kvjax.eval.command.keep_compiled_programs", lambda: None)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "recipes.yaml").write_text(RECIPES)

    def run(*argv):
        own = {"--model": model, "--text": tmp_path / "text.txt", "--out": tmp_path / "out"}
        own |= {"--window": WINDOW, "--stride": STRIDE, "--batch-size": 5, "--dtype": "float32"}
        own |= {"--recipes": tmp_path / "recipes.yaml"}
        words = [str(word) for pair in own.items() for word in pair]
        code = perplexity.main([*words, *map(str, argv)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def expected(model) -> tuple[float, int]:  # noqa: F811
    """Each token from its window's beginning, one after the other, in float64."""
    lm = kvjax.load(model)
    ids, total, count = lm.tokenizer.encode(TEXT), 0.0, 0
    logits = {}
    for at in range(WINDOW - STRIDE, len(ids)):
        start = (at - (WINDOW - STRIDE)) // STRIDE * STRIDE
        if start + WINDOW > len(ids):
            break
        if start not in logits:
            window = kvjax.forward(lm, ids[start : start + WINDOW])
            logits[start] = np.asarray(window[0], np.float64)
        before = logits[start][at - start - 1]
        total += math.log(np.exp(before - before.max()).sum()) + before.max() - before[ids[at]]
        count += 1
    return math.exp(total / count), count


def test_perplexity_is_that_of_every_token_once(measure, model, tmp_path):  # noqa: F811
    code, out, _ = measure()
    found = json.loads((tmp_path / "out" / "perplexity.json").read_text())
    full, tight = found["results"]
    value, count = expected(model)
    assert code == 6 and "fewest tokens" in tight["refused"]
    assert out.startswith(f"window {WINDOW}, stride {STRIDE}: 5 windows, 120 of 165 tokens")
    assert full["perplexity"] == pytest.approx(value, rel=1e-5) and full["scored"] == count == 120
    assert full["kl"] < 1e-6 and full["top1"] == 1 and full["method"] == "full"
    low, high = full["interval"]
    assert low < full["perplexity"] < high

    def never(*args, **options):
        raise AssertionError("loaded again")

    with pytest.MonkeyPatch.context() as patch:  # all is there
        patch.setattr(kvjax, "load", never)
        assert measure()[0] == 6
    assert json.loads((tmp_path / "out" / "perplexity.json").read_text())["results"][0] == full


def row(recipe, window, nll):
    method = "full" if recipe == "full" else "rkv"
    own = {"budget": None, "codec": None, "share": None, "row_bytes": 1, "kl": 0.1, "top1": 0.9}
    held = {"bytes": {"peak": 2.0 + window}, "ratio": {"peak": 0.5}, "scored": 10}
    return {"recipe": recipe, "window": window, "method": method, "nll": nll, **own, **held}


def test_recipes_are_set_beside_the_full_cache_window_by_window():
    values = {"full": [1.0, 3.0, 2.0, 9.0], "rkv": [1.5, 3.1, 2.3]}
    rows = [row(name, n, nll) for name, own in values.items() for n, nll in enumerate(own)]
    full, ours = windows.summarise(rows)
    assert full["perplexity"] == pytest.approx(math.exp(15 / 4)) and full["scored"] == 40
    apart = np.array([0.5, 0.1, 0.3])
    assert ours["beside_full"]["windows"] == 3 and ours["bytes"]["peak"] == 3
    assert ours["beside_full"]["nll"] == pytest.approx(apart.mean())
    assert ours["beside_full"]["error"] == pytest.approx(apart.std(ddof=1) / math.sqrt(3))
    error = np.std(values["rkv"], ddof=1) / math.sqrt(3)
    bounds = np.exp(2.3 + 1.96 * error * np.array([-1, 1]))
    np.testing.assert_allclose(ours["interval"], bounds)
    assert "beside_full" not in full


def test_every_token_is_scored_once():
    ids = np.arange(100)
    rows = windows.windows(ids, 40, 15)
    assert rows.shape == (5, 40)
    np.testing.assert_array_equal(rows[:, -15:].ravel(), np.arange(25, 100))
    np.testing.assert_array_equal(rows[:, 0], [0, 15, 30, 45, 60])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--stride", WINDOW), "--stride"),
        (("--tokens", 30), "--tokens 30"),
        (("--window", 4096), "below --window"),
        (("--text", "absent.txt"), "absent.txt"),
    ],
)
def test_what_cannot_be_read_is_refused(measure, argv, message):
    code, _, err = measure(*argv)
    assert code == 2 and message in err
