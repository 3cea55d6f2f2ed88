"""One run of the perplexity command: windows of a text, scored under every recipe."""

import math
import pathlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvjax.command.files import read_text
from kvjax.command.interrupt import Interrupts
from kvjax.command.output import print_out
from kvjax.compare import compare, reference
from kvjax.errors import NumericalError, UsageError
from kvjax.eval.command import finish, load, open_rows, refusal, telling
from kvjax.eval.perplexity import PerplexityConfig
from kvjax.eval.recipes import Settled, Work, read_recipes, settle, shape_of
from kvjax.eval.rows import Rows, row_key
from kvjax.eval.summary import OF_RECIPE, means
from kvjax.loading import LanguageModel
from kvjax.report.units import size

PLACE = ("window", "recipe")


def windows(ids: Sequence[int], window: int, stride: int) -> np.ndarray:
    """The windows of a text, each ``stride`` tokens further than the one before.

    The last ``stride`` tokens of each are scored, so that every token from ``window - stride`` on
    is scored once, as far as whole windows reach.

    Returns:
        Token ids [windows, window].
    """
    rows = np.lib.stride_tricks.sliding_window_view(np.asarray(ids, np.int32), window)
    return rows[::stride]


def run(config: PerplexityConfig, interrupts: Interrupts) -> int:
    """Score and return the exit code. All that can be refused is refused before weights load.

    Raises:
        KvjaxError: nothing more can be done; rows written so far stay.
    """
    named = read_recipes(config)
    shape = shape_of(config)
    if shape.tokenizer is None:
        raise UsageError(f"{shape.source} has no tokenizer: name one with --tokenizer")
    ids = shape.tokenizer.encode(read_text(config.text, "--text"))[: config.tokens]
    if len(ids) < config.window:
        raise UsageError(
            f"--text: {config.text} has {len(ids):,} tokens, below --window {config.window}"
        )
    rows = windows(ids, config.window, config.stride)
    work = Work([config.window - config.stride], config.stride)
    together = min(config.batch_size, len(rows))
    settled = [settle(one, shape, work, together) for one in named]
    head = {
        "text": pathlib.Path(config.text).name,
        "window": config.window,
        "stride": config.stride,
        "windows": len(rows),
        "scored": len(rows) * config.stride,
    }
    print_out(
        f"window {config.window:,}, stride {config.stride:,}: {len(rows):,} windows, "
        f"{head['scored']:,} of {len(ids):,} tokens are scored\n"
    )
    refused = [refusal(one) for one in settled if one.refused]
    with open_rows(config, "perplexity", PLACE) as kept:
        passes = _Passes(config, rows, [one for one in settled if one.recipe], kept)
        if any(todo for _, _, todo in passes.missing(shape)):
            lm = load(config, shape, interrupts)
            with telling(config) as progress:
                progress.phase("reading (compiles at first)")
                for done in passes.run(lm):
                    progress.update(done)
                    if interrupts.requested():
                        break
        found = head | {"results": summarise(kept.rows) + refused}
        return finish(config, "perplexity", shape, found, described, interrupts)


class _Passes:
    """Batches of windows under every recipe."""

    def __init__(
        self, config: PerplexityConfig, rows: np.ndarray, settled: list[Settled], kept: Rows
    ):
        self._config, self._rows, self._settled, self._kept = config, rows, settled, kept

    def missing(self, lm: LanguageModel) -> Iterator[tuple[int, Settled, list[tuple[int, str]]]]:
        """For every batch and recipe the batch's first window, and windows to score with keys."""
        for start in range(0, len(self._rows), self._config.batch_size):
            for one in self._settled:
                todo = []
                for index in range(start, min(start + self._config.batch_size, len(self._rows))):
                    origin = one.origin(lm, self._config)
                    key = row_key(*origin, self._config.stride, self._rows[index].tolist())
                    if not self._kept.has(key, window=index, recipe=one.name):
                        todo.append((index, key))
                yield start, one, todo

    def run(self, lm: LanguageModel) -> Iterator[str]:
        """Score what is missing; tells what has been done, batch by batch."""
        config, prompt = self._config, self._config.window - self._config.stride
        plain, read = None, None
        for start, one, todo in self.missing(lm):
            if not todo:
                continue
            ids = self._rows[start : start + config.batch_size]
            if read != start:  # the pass without a cache serves all recipes
                plain, read = reference(lm, ids, prompt_tokens=prompt), start
            found = compare(lm, plain, recipe=one.recipe, seed=config.seed, by_tick=True)
            for index, key in todo:
                row = {"key": key, "window": index, "recipe": one.name, **one.as_dict()}
                row["scored"] = config.stride
                row["nll"] = float(found.nlls[index - start].mean(dtype=np.float64))
                if not math.isfinite(row["nll"]):
                    raise NumericalError(
                        f"recipe {one.name}, window {index}: the logits hold NaN or infinity; try "
                        "--dtype float32, or check the weights"
                    )
                row["kl"] = float(found.kl[index - start].mean(dtype=np.float64))
                # Of the batch, whose windows are of one length.
                row |= {"top1": found.top1_agreement, "nll_full": found.nll_full}
                row |= {"bytes": found.bytes, "ratio": found.ratio}
                self._kept.add(row)
            yield f"{one.name}: {start + len(ids):,}/{len(self._rows):,} windows"


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Figures of every recipe, beside the full cache on the windows that both have."""
    by_recipe: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        by_recipe.setdefault(row["recipe"], {})[row["window"]] = row
    full = next((own for own in by_recipe.values() if own[min(own)]["method"] == "full"), {})
    found = []
    for name, own in by_recipe.items():
        first = own[min(own)]
        nll, error = _mean([row["nll"] for row in own.values()])
        figures = {
            "recipe": name,
            **{key: first[key] for key in OF_RECIPE},
            "windows": len(own),
            "scored": sum(row["scored"] for row in own.values()),
            "nll": nll,
            "perplexity": math.exp(nll),
            "interval": [math.exp(nll + sign * 1.96 * error) for sign in (-1, 1)],
        }
        for key in ("kl", "top1"):
            figures[key] = statistics.fmean(row[key] for row in own.values())
        for key in ("bytes", "ratio"):
            figures[key] = means(list(own.values()), key)
        both = sorted(own.keys() & full.keys())
        if both and own is not full:
            apart, error = _mean([own[at]["nll"] - full[at]["nll"] for at in both])
            figures["beside_full"] = {"windows": len(both), "nll": apart, "error": error}
        found.append(figures)
    return found


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error; none is known of a single value."""
    spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), spread


def described(found: dict[str, Any]) -> str:
    """One line of a table, for people."""
    if "refused" in found:
        return f"{found['recipe']:18} refused: {found['refused']}"
    low, high = found["interval"]
    text = (
        f"{found['recipe']:18} perplexity {found['perplexity']:.3f} [{low:.3f}, {high:.3f}] · "
        f"KL {found['kl']:.2e} · top-1 {found['top1']:.1%} · {size(found['bytes']['peak'])} "
        f"({found['ratio']['peak']:.3f})"
    )
    if "beside_full" in found:
        apart = found["beside_full"]
        text += f" · {apart['nll']:+.4f} ± {apart['error']:.4f} nats beside full"
    return text
