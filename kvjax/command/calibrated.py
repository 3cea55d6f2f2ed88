"""Which calibration tells a run's thoughts apart; and whether an adapter is the model's."""

import contextlib
import dataclasses

from kvjax import loading
from kvjax.command.decode_options import DecodeConfig
from kvjax.command.inputs import model_source
from kvjax.command.recipe import flags_in_errors
from kvjax.errors import ModelError, UsageError
from kvjax.recipes import Recipe, thinkv
from kvjax.thoughts import Given, Sparsity
from kvjax.thoughts.calibration import Calibration, by_sparsity


def calibrated(recipe: Recipe, config: DecodeConfig) -> Recipe:
    """The recipe with the calibration that comes with kvjax for the model, unless one is given.

    Weights that are not on this machine yet cannot be looked at: the library checks them once they
    are loaded.

    Raises:
        UsageError: the given one is another model's, or a switch of sparsity is given and nothing
            tells thoughts apart by it.
    """
    recipe = _calibrated(recipe, config)
    if config.sparsity_correction is not None and not isinstance(recipe.segmenter, Sparsity):
        raise UsageError(
            "--sparsity-correction has no effect without a calibration that tells thoughts apart"
        )
    return recipe


def _calibrated(recipe: Recipe, config: DecodeConfig) -> Recipe:
    if recipe.name != "thinkv" or config.thoughts is not None:
        return recipe
    path = loading.resolve(model_source(config), config.revision, weights=False)
    try:
        fingerprint = loading.read_fingerprint(path)
    except ModelError:
        return recipe
    if config.calibration is not None:
        try:
            given = Calibration.load(config.calibration)
            given.for_model(fingerprint, loading.read_config(path).num_layers)
        except UsageError as error:
            raise UsageError(f"--calibration: {error}") from error
        return recipe
    found = Calibration.shipped(fingerprint)
    if found is None:
        return recipe
    corrected = config.sparsity_correction
    corrected = not config.paper if corrected is None else corrected
    segmenter = by_sparsity(recipe.segmenter, found, corrected)
    if isinstance(segmenter, Given):
        return recipe
    return dataclasses.replace(recipe, segmenter=segmenter, **_precision(config))


def check_adapter(recipe: Recipe, config: DecodeConfig) -> None:
    """Refuse an adapter of another model, as far as the model can be looked at already.

    Raises:
        UsageError: it is another model's.
    """
    if recipe.projector is None:
        return
    source = model_source(config)
    path = loading.resolve(source, config.revision, weights=False)
    with contextlib.suppress(ModelError), flags_in_errors():
        recipe.projector.for_model(loading.read_fingerprint(path), source)


def _precision(config: DecodeConfig) -> dict[str, tuple[str, str, str]]:
    """Codecs by thought, where they were those of a single kind by default."""
    if config.kv_bits is not None or config.adapter is not None:
        return {}
    return {"thought_codecs": thinkv(segmenter=Given("RET"), paper=config.paper).thought_codecs}


def described_thoughts(recipe: Recipe) -> str | None:
    """A line that says how thoughts are told apart; None where they need not be."""
    if recipe.name != "thinkv":
        return None
    segmenter = recipe.segmenter
    if isinstance(segmenter, Sparsity):
        layers = ", ".join(map(str, segmenter.layers))
        low, high = segmenter.thresholds
        return (
            f"thoughts by the attention sparsity of layers {layers}: E < {low:.3f}, T > {high:.3f}"
        )
    if set(segmenter.kinds) == {"R"}:
        return "thoughts are all of one kind: no calibration tells this model's apart"
    return f"thoughts as given: {segmenter.kinds}"
