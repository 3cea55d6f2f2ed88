"""Perplexity at a measured rate."""

import numpy as np
import optax
import pytest

import kvjax
from kvjax.eval.bench_dynakv import (
    arms,
    draw,
    measured,
    plain_score,
    points_of,
    rounded,
    spectral_score,
)
from kvjax.train.matryoshka.files import Matryoshka, Point, save_matryoshka
from kvjax.train.matryoshka.projections import Projections
from tests.dynakv.tiny import WIDTH, fitted, tiny, tokens


@pytest.fixture(scope="module")
def rows():
    return tokens(tiny(), (3, 12), seed=5)


def test_the_models_own_perplexity_is_that_of_its_logits(rows):
    found = measured(plain_score(tiny()), rows)
    logits = kvjax.forward(tiny(), rows)
    each = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], rows[:, 1:])
    each = np.asarray(each.mean(1))
    assert found["perplexity"] == pytest.approx(np.exp(np.mean(each)), rel=1e-5)
    low, high = found["interval"]
    half = 1.96 * np.std(each, ddof=1) / np.sqrt(3)
    assert np.log(high / low) == pytest.approx(2 * half, rel=1e-3)
    assert found["rate"] == 1


def test_all_components_cost_nothing_and_some_cost_something(rows):
    lm = tiny()
    plain = measured(plain_score(lm), rows)["perplexity"]
    whole = fitted(lm, gate="fixed", key_rank=WIDTH, value_rank=WIDTH)
    whole = measured(spectral_score(lm, whole), rows)
    assert whole["perplexity"] == pytest.approx(plain, rel=1e-4) and whole["rate"] == 1
    part = fitted(lm, gate="fixed", key_rank=3, value_rank=6)
    found = measured(spectral_score(lm, part), rows)
    assert abs(np.log(found["perplexity"] / plain)) > 0.01
    assert (found["rate_keys"], found["rate_values"]) == (3 / WIDTH, 6 / WIDTH)
    up = measured(spectral_score(lm, rounded(part, 4)), rows)
    assert (up["rate_keys"], up["rate_values"]) == (4 / WIDTH, 8 / WIDTH)
    assert up["rate"] == pytest.approx(6 / WIDTH)


def test_a_folder_of_matryoshka_is_a_point_for_each_rate(rows, tmp_path):
    lm = tiny()
    whole = np.full((1, 2, 2), 8, np.int32)
    part = np.array([[[3, 8], [1, 4]]], np.int32)
    found = [Point(rate, ranks, {}) for rate, ranks in ((1.0, whole), (0.5, part))]
    u = np.broadcast_to(np.eye(8, dtype=np.float32), (1, 2, 2, 8, 8))
    projections = Projections(u, np.zeros((1, 2, 2, 8), np.float32))
    kept = Matryoshka(projections, tuple(found), lm.fingerprint, "tiny", {"tokens": 0})
    save_matryoshka(kept, tmp_path)
    (first, kinds), (second, others) = points_of(lm, tmp_path)
    assert (first["target_rate"], second["target_rate"]) == (1.0, 0.5)
    plain = measured(plain_score(lm), rows)["perplexity"]
    same = measured(kinds["exact"], rows)
    assert same["perplexity"] == pytest.approx(plain, rel=1e-4) and same["rate"] == 1
    less = measured(others["exact"], rows)
    assert abs(np.log(less["perplexity"] / plain)) > 0.01
    assert (less["rate_keys"], less["rate_values"]) == (11 / 16, 5 / 16)


def test_arms_have_a_name_and_folders():
    named = [(name, str(folder)) for name, folder in arms(["pca=a,b", "dynakv=c"])]
    assert named == [("pca", "a"), ("pca", "b"), ("dynakv", "c")]
    for wrong in ("pca", "=a", "pca="):
        with pytest.raises(SystemExit, match="NAME=FOLDER"):
            list(arms([wrong]))


def test_a_picture_has_a_panel_for_each_text(tmp_path):
    point = {"rate": 0.5, "perplexity": 9.0}
    record = {
        "full": {"one": {"perplexity": 8.0}, "two": {"perplexity": 7.0}},
        "results": [{"arm": "pca", "exact": {"one": point, "two": point}}],
    }
    draw(record, tmp_path / "folder" / "found.png")
    assert (tmp_path / "folder" / "found.png").read_bytes()[1:4] == b"PNG"
