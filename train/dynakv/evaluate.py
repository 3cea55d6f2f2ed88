"""What a training has come to, measured on rows that it never sees."""

from typing import Any

import jax
import numpy as np

from kvjax.models.decoder import Decoder
from kvjax.train.dynakv.data import Rows, in_batches
from kvjax.train.dynakv.loss import Sums, Trained, plain_cross_entropy
from kvjax.train.dynakv.settings import TrainSettings
from kvjax.train.dynakv.state import Trainer, TrainState

_WORST = 1.05  # how far above the target rate a model may be and still count as one of that rate
_PENALTY = 100.0  # nats for each unit of rate beyond that


def plain_nats(trainer: Trainer, model: Decoder, rows: Rows) -> float:
    """Cross-entropy of a model without compression."""
    batches = in_batches(rows, trainer.settings.batch_size)
    spread = [trainer.spread(part.tokens, part.valid) for part in batches]
    found = [jax.device_get(_plain(model, *part)) for part in spread]
    nats, predicted = np.sum(np.asarray(found, np.float64), 0)
    return float(nats / predicted)


def evaluate(trainer: Trainer, state: TrainState, rows: Rows) -> dict[str, Any]:
    """Cross-entropies, rates by layer and part, and how well U can be inverted; all plain numbers.

    ``hard`` is what a cache does, ``soft`` what training sees. Rates are shares of all components;
    ``rate_without_first`` leaves out every row's first token, which keeps the most.
    """
    soft, hard = (_total(trainer, state, rows, mode) for mode in ("soft", "hard"))
    later = (hard.hard - hard.hard_first) / max(hard.tokens - hard.first, 1.0)
    by_layer = hard.hard / hard.tokens
    return {
        "ce_soft": float(soft.nats / soft.predicted),
        "ce_hard": float(hard.nats / hard.predicted),
        "rate_soft": float(soft.soft.mean() / soft.tokens),
        "rate_hard": float(by_layer.mean()),
        "rate_keys": float(by_layer[:, 0].mean()),
        "rate_values": float(by_layer[:, 1].mean()),
        "rate_without_first": float(later.mean()),
        "rate_by_layer": by_layer.tolist(),
        **condition(trainer.trained(state)),
    }


def score(found: dict[str, Any], settings: TrainSettings) -> float:
    """By which checkpoints are compared, lower being better.

    With a given alpha it is the loss, of the hard mask; with a target rate, the cross-entropy of
    those that meet it, before all that do not.
    """
    if settings.target_rate is None:
        return found["ce_hard"] + settings.alpha * found["rate_hard"] ** 2
    excess = max(0.0, found["rate_hard"] - _WORST * settings.target_rate)
    return found["ce_hard"] + _PENALTY * excess


def condition(trained: Trained) -> dict[str, float]:
    """The largest condition number of a U, and the largest entry of any U times what rebuilds - 1.

    With a free inverse the second is no error: it is what was learned.
    """
    numbers, residuals = [], []
    for layer in jax.device_get(_bases(trained)):
        for u, inverse in layer:
            u, inverse = u.astype(np.float64), inverse.astype(np.float64)
            numbers.append(np.linalg.cond(u) if np.isfinite(u).all() else np.inf)
            residuals.append(np.abs(u @ inverse - np.eye(len(u))).max())
    return {"condition": float(max(numbers)), "inverse_error": float(max(residuals))}


_plain = jax.jit(plain_cross_entropy)


@jax.jit
def _bases(trained: Trained):
    return trained.spectra.bases()


def _total(trainer: Trainer, state: TrainState, rows: Rows, mode: str) -> Sums:
    """In float64, so that it does not matter how many rows there are."""
    total = None
    for part in in_batches(rows, trainer.settings.batch_size):
        found = jax.device_get(trainer.sums(state, part.tokens, part.valid, mode))
        found = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), found)
        total = found if total is None else jax.tree.map(np.add, total, found)
    return total
