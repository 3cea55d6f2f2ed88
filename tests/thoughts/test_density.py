"""Modes, thresholds and the choice of layers, on samples whose density is known."""

import dataclasses
import itertools

import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from kvjax.errors import UsageError
from kvjax.thoughts.density import density, fit
from kvjax.thoughts.settings import FitSettings

CENTRES, SPREAD = (0.3, 0.6, 0.85), 0.04
NONE = (None,)


def mixture(*parts: tuple[float, float, int], seed: int = 0) -> np.ndarray:
    """Samples of Gaussians, of which each part gives centre, spread and how many."""
    rng = np.random.default_rng(seed)
    drawn = [rng.normal(at, spread, count) for at, spread, count in parts]
    return np.concatenate(drawn).astype(np.float32)


def three(seed: int = 0, shift: float = 0.0, count: int = 400) -> np.ndarray:
    return mixture(*((at + shift, SPREAD, count) for at in CENTRES), seed=seed)


def one(seed: int = 0, count: int = 1200) -> np.ndarray:
    return mixture((0.6, 0.1, count), seed=seed)


def true_valley(left: float, right: float) -> float:
    """Of the mixture itself, not of samples."""

    def at(x):
        return sum(scipy.stats.norm.pdf(x, centre, SPREAD) for centre in CENTRES)

    return scipy.optimize.minimize_scalar(at, bounds=(left, right), method="bounded").x


def test_modes_and_valleys_of_a_mixture_are_found():
    found = density(three(count=4000), FitSettings())
    assert found.trimodal
    np.testing.assert_allclose(found.modes, CENTRES, atol=0.01)
    valleys = [true_valley(*pair) for pair in itertools.pairwise(CENTRES)]
    np.testing.assert_allclose(found.valleys, valleys, atol=0.02)
    assert 0.5 < found.depth < 1
    # It is a density, and its grid reaches to where it is nothing.
    assert np.trapezoid(found.values, found.grid) == pytest.approx(1, abs=1e-2)
    assert max(found.values[0], found.values[-1]) < 0.02 * found.values.max()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_as_many_modes_as_there_are(count):
    samples = mixture(*((at, 0.02, 300) for at in np.linspace(0.1, 0.9, count)))
    found = density(samples, FitSettings(bandwidth=0.1 if count > 1 else "scott"))
    assert len(found.modes) == count and len(found.valleys) == count - 1
    assert found.trimodal == (count == 3)


def test_far_apart_the_valley_is_in_the_middle():
    samples = mixture((0.1, 1e-4, 200), (0.5, 1e-4, 200), (0.9, 1e-4, 200))
    found = density(samples, FitSettings(bandwidth=0.01, grid=4096))
    np.testing.assert_allclose(found.valleys, [0.3, 0.7], atol=0.01)
    assert found.depth == pytest.approx(1)


@pytest.mark.parametrize("value", [0.0, 0.7, 1.0])
def test_one_value_is_one_mode(value):
    found = density(np.full(100, value, np.float32), FitSettings())
    assert found.modes == pytest.approx([value]) and found.valleys == () and found.depth == 0


def test_modes_at_the_ends_of_the_range_count():
    samples = np.clip(mixture((0.0, 0.02, 500), (0.5, 0.02, 500), (1.0, 0.02, 500)), 0, 1)
    found = density(samples, FitSettings())
    assert found.trimodal
    assert 0 < found.valleys[0] < found.valleys[1] < 1


def test_a_small_bump_counts_only_below_its_prominence():
    samples = mixture((0.3, 0.04, 2000), (0.6, 0.04, 2000), (0.9, 0.02, 60))
    assert density(samples, FitSettings(prominence=0.02, bandwidth=0.1)).trimodal
    assert len(density(samples, FitSettings(prominence=0.2, bandwidth=0.1)).modes) == 2


def test_noise_about_one_value_is_not_tri_modal():
    settings = FitSettings()
    assert not any(density(one(seed), settings).trimodal for seed in range(50))
    # The control can fail: with a narrow bandwidth noise has many modes.
    narrow = FitSettings(bandwidth=0.15, prominence=0.01)
    assert any(density(one(seed, 128), narrow).trimodal for seed in range(50))


def test_bandwidth_is_a_rule_or_a_factor():
    samples = three()
    scott, silverman, factor = (
        density(samples, FitSettings(bandwidth=bandwidth)).values
        for bandwidth in ("scott", "silverman", len(samples) ** (-1 / 5))
    )
    np.testing.assert_allclose(scott, factor, rtol=1e-6)
    assert np.abs(scott - silverman).max() > 1e-3
    assert not density(samples, FitSettings(bandwidth=1.0)).trimodal


def layers_of(*prompts) -> list[np.ndarray]:
    return [np.stack(layers) for layers in prompts]


def test_layers_are_chosen_by_how_often_they_show_three_modes():
    samples = layers_of(
        *([one(i), three(i), three(i + 9) if i < 3 else one(i), one(i + 5)] for i in range(4))
    )
    found = fit(samples, NONE * 4, FitSettings(layers=2))
    assert found.trimodal == (0, 1, 0.75, 0)
    assert found.layers == (1, 2) == found.ranking[:2]
    assert len(found.densities) == 4 and found.tokens == 4 * 1200
    assert fit(samples, NONE * 4, FitSettings(layers=1)).layers == (1,)
    # Fewer layers qualify than are asked for.
    assert fit(samples, NONE * 4, FitSettings(layers=4)).layers == (1, 2)
    assert fit(samples, NONE * 4, FitSettings(min_share=1)).layers == (1,)


def test_thresholds_are_the_mean_over_layers_of_their_own_tri_modal_prompts():
    samples = layers_of([three(1), three(2, 0.04)], [three(3, 0.02), one(4)], [one(5), one(6)])
    settings = FitSettings(min_share=0.3)
    found = fit(samples, NONE * 2, settings)
    assert found.layers == (0, 1)
    first = [density(three(1), settings).valleys, density(three(3, 0.02), settings).valleys]
    means = np.mean(first, 0), density(three(2, 0.04), settings).valleys
    np.testing.assert_allclose(found.thresholds, np.mean(means, 0), rtol=1e-12)
    # A mean over all pairs, or over all prompts, would be another.
    pairs = np.mean([*first, means[1]], 0)
    assert np.abs(pairs - found.thresholds).max() > 1e-3


def test_layers_with_a_window_are_counted_and_never_chosen():
    samples = layers_of(*([three(i), three(i + 5)] for i in range(2)))
    found = fit(samples, (16, None), FitSettings())
    assert found.trimodal == (1, 1) and found.layers == found.ranking == (1,)


def test_ties_go_to_the_deepest_valleys_or_by_index():
    shallow = mixture(*((at, 0.06, 400) for at in CENTRES))
    samples = layers_of([shallow, three(), shallow])

    def chosen(tie_break):
        return fit(samples, NONE * 3, FitSettings(layers=2, tie_break=tie_break)).layers

    assert density(shallow, FitSettings()).trimodal
    assert [chosen(rule) for rule in ("depth", "first", "last")] == [(1, 0), (0, 1), (2, 1)]


def test_no_layer_is_a_verdict():
    found = fit(layers_of([one(1), one(2)]), NONE * 2, FitSettings())
    assert (found.layers, found.thresholds, found.trimodal) == ((), None, (0, 0))
    assert set(found.ranking) == {0, 1}


def test_short_answers_take_no_part():
    samples = layers_of([three(1)], [three(2)[:63]])
    found = fit(samples, NONE, FitSettings())
    assert len(found.densities) == 1 and found.tokens == 1200 and found.trimodal == (1,)
    with pytest.raises(UsageError, match="no answer has 64 tokens, the longest has 63"):
        fit(samples[1:], NONE, FitSettings())


def test_the_same_samples_give_the_same_fit():
    samples = layers_of([three(1), three(2)], [three(3), one(4)])
    first, second = (fit(samples, NONE * 2, FitSettings()) for _ in range(2))
    assert (first.layers, first.thresholds) == (second.layers, second.thresholds)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bandwidth", "wide"),
        ("bandwidth", 0.0),
        ("bandwidth", float("inf")),
        ("bandwidth", True),
        ("grid", 15),
        ("grid", 512.0),
        ("prominence", 0),
        ("prominence", float("nan")),
        ("min_share", 1.1),
        ("min_samples", 1),
        ("tie_break", "luck"),
        ("layers", 0),
        ("layers", True),
    ],
)
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(UsageError, match=f"^{field} must be"):
        dataclasses.replace(FitSettings(), **{field: value})
