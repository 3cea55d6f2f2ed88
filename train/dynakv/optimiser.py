"""Adam with a learning rate for each kind of parameter."""

import jax
import optax

from kvjax.train.dynakv.settings import TrainSettings

_BETAS = (0.9, 0.95)
_EPS = 1e-15
"""A gate starts with low ranks at exp(-tilt) of the probability of high ones, and so small are the
gradients of their biases. With the usual 1e-8 these would stay where they are, and rates below 0.35
out of reach."""
_BASES = {"u", "u_inverse", "turn"}


def optimiser(settings: TrainSettings) -> optax.GradientTransformation:
    """Clip, then Adam with warm-up and a cosine to zero for each group of parameters.

    Nothing decays: pulling U towards zero would take its inverse away.
    """

    def adam(peak: float) -> optax.GradientTransformation:
        return optax.adam(schedule(peak, settings), *_BETAS, eps=_EPS)

    groups = {
        "basis": adam(settings.lr_u),
        "gate": adam(settings.lr_gate),
        "bias": adam(settings.lr_bias),
        "model": adam(settings.lr_model),
    }
    return optax.chain(
        optax.clip_by_global_norm(settings.clip), optax.multi_transform(groups, _labels)
    )


def schedule(peak: float, settings: TrainSettings) -> optax.Schedule:
    """The learning rate of every update; the first one already has some."""
    warmup = min(settings.warmup, max(settings.steps - 1, 0))
    if not warmup:
        return optax.cosine_decay_schedule(peak, max(settings.steps, 1))
    return optax.warmup_cosine_decay_schedule(
        peak / (warmup + 1), peak, warmup, max(settings.steps, warmup + 1)
    )


def _labels(parameters):
    return jax.tree_util.tree_map_with_path(lambda path, _: _group(path), parameters)


def _group(path) -> str:
    names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
    if names[0] == "model":
        return "model"
    if "b" in names:
        return "bias"
    return "basis" if _BASES & set(names) else "gate"
