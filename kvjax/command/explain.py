"""``--explain``: the ranks at which a text's tokens would be kept."""

import sys

import kvjax
from kvjax.command.calibrated import check_adapter
from kvjax.command.compile_cache import keep_compiled_programs
from kvjax.command.decode_options import DecodeConfig
from kvjax.command.files import check_matplotlib, check_writable
from kvjax.command.inputs import model_source
from kvjax.command.output import OutputError, print_out
from kvjax.command.recipe import flags_in_errors, given_recipe
from kvjax.dynakv.explain import kept_ranks
from kvjax.dynakv.spectrum import key_width
from kvjax.errors import ModelError, UsageError
from kvjax.report.progress import ProgressLine
from kvjax.report.ranks import draw_ranks, shown


def explain(config: DecodeConfig) -> int:
    """Print the picture, and draw it where ``--trace`` says; returns the exit code.

    Raises:
        KvjaxError: an option cannot be used, or the text is too long.
    """
    recipe = given_recipe(config)
    if recipe is None or recipe.projector is None:
        raise UsageError("--explain shows ranks: pass --method dynakv and --adapter DIR")
    if config.trace is not None:
        check_matplotlib("--trace")
        check_writable(config.trace, "--trace")
    check_adapter(recipe, config)
    progress = ProgressLine(sys.stderr, enabled=not config.quiet)
    keep_compiled_programs()
    source = model_source(config)
    progress.phase(f"loading {source}")
    lm = kvjax.load(
        source, dtype=config.dtype, revision=config.revision, tokenizer=config.tokenizer
    )
    if lm.tokenizer is None:
        raise ModelError(f"--explain reads a text, and {source} has no tokenizer: name one")
    ids = lm.tokenizer.encode(config.explain)
    if not ids:
        raise UsageError("--explain: the text has no tokens")
    progress.phase("reading the text (compiles at first)")
    with flags_in_errors():
        recipe.projector.check(lm.config, bits=8)
        ranks = kept_ranks(lm, recipe.projector, ids)
    progress.clear()
    tokens, width = [lm.tokenizer.decode([token]) for token in ids], key_width(lm.config)
    print_out(shown(ranks, tokens, width) + "\n")
    if config.trace is not None:
        try:
            draw_ranks(ranks, tokens, width, config.trace)
        except OSError as error:
            raise OutputError(f"--trace: {config.trace}: {error.strerror}") from error
    return 0
