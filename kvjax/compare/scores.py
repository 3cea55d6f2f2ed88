"""What each tick of tokens says about a compressed run and an uncompressed one."""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.plan import Plan
from kvjax.compare.result import Comparison
from kvjax.compare.uncached import Reference
from kvjax.decoding.forced import Held
from kvjax.decoding.report import BytesLog
from kvjax.loading import LanguageModel
from kvjax.models.decoder import Decoder
from kvjax.recipes import Recipe


class Scores:
    """Collects what each tick of tokens says about the two runs."""

    def __init__(self, lm: LanguageModel, expected: Reference, planned: Plan):
        self._lm, self.ids, self.prompt = lm, expected.ids, expected.prompt_tokens
        self._expected, self._outputs = expected.hidden, expected.outputs
        self._parts: list[dict[str, Array]] = []
        self._held: list[dict[str, np.ndarray]] = []
        self._errors: list[tuple[Array, Array]] = []
        self._planned = planned
        self._done = 0

    def add(self, logits: Float[Array, "N B V"], now: Held, count: int = 1, layers=None) -> None:
        """Score the next ``count`` positions; the rest of ``logits`` is padding."""
        expected = self._expected[self._done : self._done + count]
        expected = jnp.pad(expected, ((0, len(logits) - count), (0, 0), (0, 0)))
        first = self.prompt + self._done
        given = np.zeros(logits.shape[:2], np.int32)
        given[:count] = self.ids[:, first : first + count].T
        part = score(self._lm.model, expected, logits, jnp.asarray(given))
        self._parts.append({name: np.asarray(value)[:count] for name, value in part.items()})
        self._held.append(jax.tree.map(np.asarray, vars(now)))
        if layers is not None:
            at = slice(self._done - 1, self._done - 1 + count)
            target = jnp.stack([output[:, at] for output in self._outputs])
            self._errors.append(_squares(layers[:count], target))
        self._done += count

    def result(self, recipe: Recipe) -> Comparison:
        found = {
            name: np.concatenate([part[name] for part in self._parts]).T for name in self._parts[0]
        }
        logs, held_bytes = [], []
        for row in range(len(self.ids)):
            log = BytesLog(self._planned.geometry)
            for now in self._held:
                log.add(row, **now)
                held_bytes.append(log.live_bytes)
            logs.append(log)
        reports = [log.as_dict() for log in logs]
        layers = None
        if self._errors:
            apart, whole = (np.sum([np.asarray(e[i]) for e in self._errors], 0) for i in (0, 1))
            layers = tuple(np.sqrt(apart / whole).tolist())
        return Comparison(
            method=recipe.name,
            budget=recipe.budget,
            codec=recipe.codec,
            tokens=self.ids.shape[1],
            prompt_tokens=self.prompt,
            kl_mean=float(found["kl"].mean(dtype=np.float64)),
            kl_p99=float(np.quantile(found["kl"], 0.99)),
            top1_agreement=float(found["same"].mean()),
            first_divergence=tuple(
                None if same.all() else int(same.argmin()) for same in found["same"]
            ),
            nll=float(found["nll"].mean(dtype=np.float64)),
            nll_full=float(found["nll_full"].mean(dtype=np.float64)),
            live_tokens=_mean([report["live_tokens"] for report in reports]),
            bytes={
                "peak": statistics.fmean(log.peak_bytes for log in logs),
                "time_avg": statistics.fmean(held_bytes),
                "end": statistics.fmean(log.live_bytes for log in logs),
                "full_bf16": float(logs[0].full_bytes),
            },
            ratio=_mean([report["ratio"] for report in reports]),
            crowded=int(self._held[-1]["crowded"].sum()),
            per_layer=layers,
            kl=found["kl"],
            nlls=found["nll"],
        )


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.fmean(row[key] for row in rows) for key in rows[0]}


@jax.jit
def score(
    model: Decoder,
    expected: Float[Array, "N B E"],
    logits: Float[Array, "N B V"],
    given: Int[Array, "N B"],
) -> dict[str, Array]:
    """What one tick of tokens says; a divergence below zero is rounding, and counts as none."""
    full = jax.nn.log_softmax(model.logits(expected))
    ours = jax.nn.log_softmax(logits)
    at = given[..., None]
    return {
        "kl": jnp.maximum((jnp.exp(full) * (full - ours)).sum(-1), 0.0),
        "same": full.argmax(-1) == ours.argmax(-1),
        "nll": -jnp.take_along_axis(ours, at, -1)[..., 0],
        "nll_full": -jnp.take_along_axis(full, at, -1)[..., 0],
    }


@jax.jit
def _squares(layers: Float[Array, "N L B Hq D"], target: Float[Array, "L B N Hq D"]):
    """Squares of each layer's difference, and of what it differs from, summed."""
    target = jnp.moveaxis(target, 2, 0).astype(jnp.float32)
    apart = layers.astype(jnp.float32) - target
    return (apart**2).sum((0, 2, 3, 4)), (target**2).sum((0, 2, 3, 4))
