"""Modes of sparsity, the thresholds between them, and the layers that show three."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import scipy.signal
import scipy.stats
from jaxtyping import Float

from kvjax.errors import UsageError
from kvjax.thoughts.settings import FitSettings

THOUGHTS = 3
"""Kinds of thought, and so modes: execution, reasoning, transition, from dense to sparse."""

_MARGIN = 3.0  # bandwidths beyond the outermost samples, where the estimate is nearly zero
_SAME = 1e-6  # samples that differ by less than this are one value


@dataclasses.dataclass(frozen=True)
class Density:
    """A kernel density estimate of one answer's sparsity in one layer.

    Attributes:
        grid: where it was taken, evenly spaced.
        values: the density there.
        modes: positions of its modes, ascending.
        valleys: position of the lowest point between each two neighbouring modes.
        depth: how far the shallowest valley lies below the lower of its modes, relative to that
            mode; 0 where there is no valley.
    """

    grid: Float[np.ndarray, " G"]
    values: Float[np.ndarray, " G"]
    modes: tuple[float, ...]
    valleys: tuple[float, ...]
    depth: float

    @property
    def trimodal(self) -> bool:
        """Exactly three modes; with more it is not clear which valleys part the thoughts."""
        return len(self.modes) == THOUGHTS


@dataclasses.dataclass(frozen=True)
class Fit:
    """What the samples of several prompts say.

    Attributes:
        layers: those chosen, best first; empty if no layer qualifies.
        thresholds: below the first a thought is execution, above the second a transition, between
            them reasoning. None if no layer qualifies.
        trimodal: for each layer, the share of prompts on which it shows exactly three modes.
        ranking: every layer that may be chosen, best first.
        densities: of each prompt that took part, each layer's.
        tokens: of those prompts' answers.
    """

    layers: tuple[int, ...]
    thresholds: tuple[float, float] | None
    trimodal: tuple[float, ...]
    ranking: tuple[int, ...]
    densities: tuple[tuple[Density, ...], ...]
    tokens: int


def density(samples: Float[np.ndarray, " N"], settings: FitSettings) -> Density:
    """Estimate the density of samples between 0 and 1 and find its modes."""
    samples = np.asarray(samples, np.float64)
    if np.ptp(samples) < _SAME:
        # Nothing to estimate a spread from: one mode.
        at = float(samples.mean())
        return Density(np.array([at]), np.array([1.0]), (at,), (), 0.0)
    estimate = scipy.stats.gaussian_kde(samples, bw_method=settings.bandwidth)
    margin = _MARGIN * float(np.sqrt(estimate.covariance[0, 0]))
    grid = np.linspace(samples.min() - margin, samples.max() + margin, settings.grid)
    values = estimate(grid)
    peaks, _ = scipy.signal.find_peaks(values, prominence=settings.prominence * values.max())
    valleys, depths = [], []
    for left, right in itertools.pairwise(peaks):
        between = values[left : right + 1]
        # Far apart, the density between two modes is zero on a stretch: its middle.
        lowest = left + np.flatnonzero(between == between.min())
        valleys.append(float(grid[[lowest[0], lowest[-1]]].mean()))
        depths.append(1.0 - float(between.min() / min(values[left], values[right])))
    modes = tuple(grid[peaks].tolist())
    return Density(grid, values, modes, tuple(valleys), min(depths, default=0.0))


def fit(
    samples: Sequence[Float[np.ndarray, "L _"]],
    windows: Sequence[int | None],
    settings: FitSettings,
) -> Fit:
    """Choose layers and thresholds.

    A layer's thresholds are the means over the prompts on which it shows three modes, and the
    result is the mean over the chosen layers, each counting once, as they do when a decoder
    averages their sparsity.

    Args:
        samples: of each prompt, what ``record`` returned.
        windows: each layer's sliding window, None for full attention. Layers with a window are
            counted but never chosen: their sparsity is that of the window and not of the cache.
        settings: see there.

    Raises:
        UsageError: no answer has enough tokens.
    """
    used = [found for found in samples if found.shape[1] >= settings.min_samples]
    if not used:
        longest = max((found.shape[1] for found in samples), default=0)
        raise UsageError(
            f"no answer has {settings.min_samples} tokens, the longest has {longest}: "
            "lower min_samples, or let answers be longer"
        )
    densities = tuple(tuple(density(layer, settings) for layer in found) for found in used)
    by_layer = list(zip(*densities, strict=True))
    shares = tuple(float(np.mean([one.trimodal for one in layer])) for layer in by_layer)
    ranking = _ranking(by_layer, shares, windows, settings)
    layers = tuple(i for i in ranking if shares[i] >= settings.min_share)[: settings.layers]
    thresholds = None
    if layers:
        means = [
            np.mean([one.valleys for one in by_layer[i] if one.trimodal], axis=0) for i in layers
        ]
        low, high = np.mean(means, axis=0).tolist()
        thresholds = (low, high)
    tokens = sum(found.shape[1] for found in used)
    return Fit(layers, thresholds, shares, ranking, densities, tokens)


def _ranking(
    by_layer: list[tuple[Density, ...]],
    shares: tuple[float, ...],
    windows: Sequence[int | None],
    settings: FitSettings,
) -> tuple[int, ...]:
    def order(layer: int) -> tuple[float, float, int]:
        if settings.tie_break != "depth":
            return -shares[layer], 0.0, layer if settings.tie_break == "first" else -layer
        depths = [one.depth for one in by_layer[layer] if one.trimodal]
        return -shares[layer], -float(np.mean(depths or [0.0])), layer

    full = [layer for layer, window in enumerate(windows) if window is None]
    return tuple(sorted(full, key=order))
