"""From the options of the decode command to a recipe; what a method would ignore is refused."""

import contextlib
import re
from collections.abc import Iterable, Iterator

from kvjax import recipes
from kvjax.command.decode_options import DecodeConfig
from kvjax.errors import UsageError
from kvjax.recipes import Recipe

FLAGS = {
    "page_size": "--page-size",
    "codec": "--kv-bits",
    "layer_codecs": "--kv-bits-layers",
    "budget": "--kv-budget",
    "sinks": "--sink-tokens",
    "recent": "--recent-window",
    "window": "--recent-window",
    "protect_prompt": "--protect-prompt",
    "every": "--compress-every",
    "once": "--compress-once",
    "share_of": "--share-of",
    "head_shares": "--head-shares",
    "compactor": "--compactor",
    "skip_layers": "--skip-layers",
    "compress": "--compress",
    "positions": "--positions",
    "selector": "--selector",
    "prompt_codec": "--prompt-bits",
    "thought_codecs": "--kv-bits",
    "prompt_budget": "--prompt-budget",
    "calibration": "--calibration",
    "kinds": "--thoughts",
    "covers": "--labels",
    "corrected": "--sparsity-correction",
    "segment_tokens": "--segment-tokens",
    "schedule": "--retention",
    "chooser": "--retain-by",
    "shared": "--shared-tokens",
    "at": "--transition",
    "forget": "--attend-evicted",
    "paper": "--paper",
    "stop_texts": "--stop",
    "adapter": "--adapter",
    "tau": "--tau",
    "rate": "--latent-rate",
    "blocks": "--latent-blocks",
    "samples": "--samples",
    "tp": "--tp",
    "dp": "--dp",
    "cache": "--load-cache",
    "keep_cache": "--save-cache",
    "system_prompt": "--system-prompt",
}
"""What the command calls the fields of recipes, and options of ``kvjax.stream``, in errors."""

KEEPING = ("full", "uniform", "kivi", "dynakv")
EVICTING = tuple(name for name in recipes.METHODS if name not in KEEPING)
_EVICTION = (
    "kv_budget",
    "kv_budget_bytes",
    "sink_tokens",
    "protect_prompt",
    "compress_every",
    "compress_once",
    "share_of",
    "head_shares",
    "compactor",
    "skip_layers",
    "compress",
    "positions",
    "selector",
)
_CODES = ("kv_bits", "kv_bits_layers", "prompt_bits", "recent_window")
_THOUGHTS = (
    "calibration",
    "thoughts",
    "labels",
    "sparsity_correction",
    "segment_tokens",
    "retention",
    "retain_by",
    "shared_tokens",
    "transition",
    "attend_evicted",
    "prompt_budget",
)
"""Options that method thinkv alone has."""
_LATENTS = ("adapter", "tau", "latent_rate", "latent_blocks")
"""Options of methods that keep latents: dynakv, and thinkv with an adapter."""
RECIPE_OPTIONS = (*_EVICTION, *_CODES, *_THOUGHTS, *_LATENTS, "paper", "method", "page_size")
"""Options that make a recipe."""
BESIDE_FIT = ("sink_tokens", "recent_window", "protect_prompt", "skip_layers")
"""Options that say what has to stay, whatever ``--fit`` chooses."""


@contextlib.contextmanager
def flags_in_errors() -> Iterator[None]:
    """Errors that begin with a field of the library begin with its flag instead."""
    try:
        yield
    except UsageError as error:
        field = re.match(r"\w+(?=[: ])", str(error))
        if field is None or field[0] not in FLAGS:
            raise
        raise UsageError(FLAGS[field[0]] + str(error)[field.end() :]) from error


def given_recipe(config: DecodeConfig) -> Recipe | None:
    """The recipe that the options name; None where ``--fit`` is to choose it.

    With ``--kv-budget-bytes`` its budget is still the method's own.

    Raises:
        UsageError: an option has a value that cannot be used, or no effect.
    """
    if config.fit is not None:
        _check_beside_fit(config)
        return None
    method = config.method or "full"
    _check_used(config, method)
    recent = "recent" if _evicts(config, method) and method != "thinkv" else "window"
    fields = {
        "page_size": config.page_size,
        "codec": config.kv_bits,
        "layer_codecs": config.kv_bits_layers,
        "budget": config.kv_budget,
        recent: config.recent_window,
        **staying(config),
        "every": config.compress_every,
        "compress": config.compress,
        "positions": config.positions,
        "selector": config.selector,
        "once": config.compress_once or None,
        "share_of": config.share_of,
        "head_shares": config.head_shares,
        "compactor": config.compactor,
        "prompt_codec": config.prompt_bits,
        "calibration": config.calibration,
        "kinds": config.thoughts,
        "covers": config.labels,
        # One that comes with kvjax is known only once the model is: see ``calibrated``.
        "corrected": config.sparsity_correction if config.calibration else None,
        "segment_tokens": config.segment_tokens,
        "schedule": config.retention,
        "chooser": config.retain_by,
        "shared": config.shared_tokens,
        "at": config.transition,
        "forget": False if config.attend_evicted else None,
        "prompt_budget": config.prompt_budget,
        "paper": config.paper or None,
        "adapter": config.adapter,
        "tau": config.tau,
        "rate": config.latent_rate,
        "blocks": config.latent_blocks,
    }
    with flags_in_errors():
        recipe = recipes.parse(method, **fields)
    _check_effect(config, recipe)
    return recipe


def staying(config: DecodeConfig) -> dict[str, int | str | bool | None]:
    """Fields of a recipe that evicts: what stays in any case."""
    return {
        "sinks": config.sink_tokens,
        "protect_prompt": config.protect_prompt or None,
        "skip_layers": config.skip_layers,
    }


def described(recipe: Recipe) -> str:
    """A recipe in a few words."""
    words = [recipe.name]
    if recipe.codec is not None:
        words.append(recipe.codec)
    if isinstance(recipe.budget, int):
        words.append(f"a budget of {recipe.budget:,} tokens")
    return ", ".join(words)


def _given(config: DecodeConfig, name: str) -> str | None:
    """The option as it was given, or None if it was not."""
    value = getattr(config, name)
    if value is None or value is False:
        return None
    return "--" + name.replace("_", "-") + ("" if value is True else f" {value}")


def _evicts(config: DecodeConfig, method: str) -> bool:
    return method in EVICTING or (method == "dynakv" and config.selector is not None)


def _first(config: DecodeConfig, names: Iterable[str]) -> str | None:
    """The first of these options that was given, as it was."""
    return next(filter(None, (_given(config, name) for name in names)), None)


def _check_used(config: DecodeConfig, method: str) -> None:
    if method not in ("dynakv", "thinkv") and (given := _first(config, _LATENTS)):
        raise UsageError(f"{given} is for methods dynakv and thinkv: drop it, or pass one of them")
    if method == "dynakv" and config.adapter is None:
        raise UsageError(
            "--method dynakv needs --adapter DIR, which python -m kvjax.train_dynakv writes"
        )
    if config.adapter is not None and config.prompt_bits is not None:
        raise UsageError(
            f"--prompt-bits {config.prompt_bits} has no effect with --adapter: drop it, or pass "
            "--kv-bits"
        )
    if method == "thinkv":
        _check_used_by_thinkv(config)
        return
    if given := _first(config, _THOUGHTS):
        raise UsageError(f"{given} is for method thinkv: drop it, or pass --method thinkv")
    if config.paper and method != "tam":
        raise UsageError("--paper is for methods thinkv and tam: drop it, or pass one of them")
    if _evicts(config, method):
        if config.positions == "contiguous" and (
            method != "streaming" or config.selector not in (None, "streaming")
        ):
            chosen = f"selector {config.selector}" if config.selector else f"method {method}"
            raise UsageError(
                f"--positions contiguous is for method streaming, whose tokens are the first and "
                f"the last, and not for {chosen}: drop it, or pass --method streaming"
            )
        if config.compress_once and (config.compress_every == 0 or method == "snapkv"):
            raise UsageError(
                "--compress-once has no effect where nothing is evicted from answers: drop it, or "
                "give --compress-every"
            )
        if method == "snapkv" and config.compress_every:
            raise UsageError(
                f"--compress-every {config.compress_every} has no effect with method snapkv, which "
                "evicts once, after the prompt: drop it, or pass --method snapkv_decode"
            )
        return
    if given := _first(config, _EVICTION):
        raise UsageError(
            f"{given} has no effect with method {method}, which evicts nothing"
            + (" without --selector" if method == "dynakv" else "")
            + f": drop it, or pass --method with one of {', '.join(EVICTING)}"
        )
    if method != "full":
        return
    if given := _first(config, _CODES):
        raise UsageError(
            f"{given} has no effect with method full, which keeps every token as it was made: drop "
            "it, or pass --method uniform"
        )


def _check_used_by_thinkv(config: DecodeConfig) -> None:
    keeping = [name for name in (*_EVICTION, "prompt_budget") if name != "kv_budget"]
    if config.kv_budget == "all" and (given := _first(config, keeping)):
        raise UsageError(
            f"{given} has no effect with --kv-budget all, which evicts nothing: drop it"
        )
    without = ("compress_every", "compress_once", "share_of", "head_shares", "positions")
    kept = config.prompt_budget is None  # the whole prompt
    if given := _first(config, (*without, "protect_prompt") if kept else without):
        raise UsageError(
            f"{given} has no effect with method thinkv, which evicts by segments: drop it"
        )
    if kept and (given := _first(config, ("selector", "sink_tokens"))):
        raise UsageError(
            f"{given} has no effect with method thinkv, which keeps the prompt: drop it, or give "
            "--selector and --prompt-budget"
        )


def _check_effect(config: DecodeConfig, recipe: Recipe) -> None:
    """Refuse options that together leave nothing to evict, or one of them without effect."""
    given = "--protect-prompt" if config.protect_prompt else f"--compress {config.compress}"
    if recipe.retention is not None:
        if recipe.selector is None and not {"think", "answer"} & set(recipe.compress):
            raise UsageError(
                f"{given} leaves nothing to evict with method thinkv, which keeps the prompt: drop "
                "it, or give --selector and --prompt-budget"
            )
        if recipe.selector is not None and recipe.spares_prompt:
            raise UsageError(
                f"--prompt-budget {config.prompt_budget} has no effect with {given}, which keeps "
                "the prompt: drop one of them"
            )
        return
    if recipe.selector is None:
        return
    sized = _first(config, ("kv_budget_bytes", "kv_budget"))
    if config.share_of and (config.kv_budget_bytes or isinstance(recipe.budget, int)):
        raise UsageError(
            f"--share-of {config.share_of} has no effect with "
            f"{sized or f'a budget of {recipe.budget:,} tokens'}, which is no share: drop it, or "
            "give a --kv-budget of 1.0 or below"
        )
    decoding = recipe.every and {"think", "answer"} & set(recipe.compress)
    if decoding or not recipe.spares_prompt:
        return
    if recipe.every:
        raise UsageError(
            f"{given} leaves nothing to evict with --compress {config.compress}: drop one of them"
        )
    raise UsageError(
        f"{given} leaves nothing to evict, since {recipe.name} evicts only from prompts here: drop "
        "it, or let it evict while decoding (--compress-every, or --method snapkv_decode)"
    )


def _check_beside_fit(config: DecodeConfig) -> None:
    chosen = [name for name in RECIPE_OPTIONS if name not in (*BESIDE_FIT, "page_size")]
    if given := _first(config, chosen):
        raise UsageError(
            f"{given} and --fit exclude each other, since --fit chooses it: give one of them"
        )
