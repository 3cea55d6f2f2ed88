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
- {method: streaming, kv_budget: 40, page_size: 16}
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
    full, streaming, tight = found["results"]
    value, count = expected(model)
    assert code == 6 and "fewest tokens" in tight["refused"]
    assert out.startswith(f"window {WINDOW}, stride {STRIDE}: 5 windows, 120 of 165 tokens")
    assert full["perplexity"] == pytest.approx(value, rel=1e-5) and full["scored"] == count == 120
    assert full["kl"] < 1e-6 and full["top1"] == 1 and full["method"] == "full"
    assert streaming["kl"] > 1e-4 and streaming["perplexity"] != pytest.approx(value, rel=1e-4)
    assert streaming["bytes"]["peak"] > 0 and streaming["budget"] == 40
    lines = (tmp_path / "out" / "perplexity.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    ours, theirs = ([r["nll"] for r in rows if r["method"] == m] for m in ("streaming", "full"))
    apart = np.subtract(ours, theirs)
    assert streaming["beside_full"]["nll"] == pytest.approx(apart.mean())
    assert streaming["beside_full"]["error"] == pytest.approx(apart.std(ddof=1) / math.sqrt(5))
    low, high = full["interval"]
    assert low < full["perplexity"] < high

    def never(*args, **options):
        raise AssertionError("loaded again")

    with pytest.MonkeyPatch.context() as patch:  # all is there
        patch.setattr(kvjax, "load", never)
        assert measure()[0] == 6
    assert json.loads((tmp_path / "out" / "perplexity.json").read_text())["results"][0] == full


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
