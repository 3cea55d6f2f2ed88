"""What compression changes: a compressed cache against none, on the same tokens."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache import plan
from kvjax.cache.plan import Plan, bucket
from kvjax.decoding.chunk import DecodeState
from kvjax.decoding.empty import empty_cache
from kvjax.decoding.forced import Held, force_chunk, force_together, held
from kvjax.decoding.loop import NARROWEST
from kvjax.decoding.maintain import maintain
from kvjax.decoding.prompts import prefill_prompts, seed_bits
from kvjax.decoding.report import BytesLog
from kvjax.decoding.requests import Options, Request, check_model
from kvjax.decoding.row import Row
from kvjax.errors import UsageError
from kvjax.loading import LanguageModel
from kvjax.memory import device_memory
from kvjax.models.attention import add_sinks, causal_attention
from kvjax.models.decoder import Decoder
from kvjax.models.forward import check_tokens
from kvjax.models.layers import rms_norm
from kvjax.models.rope import rotation
from kvjax.recipes import PHASES, Recipe
from kvjax.report.units import size


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far a compressed run is from the uncompressed one, on given tokens.

    Means are over all rows and scored positions: those of the tokens after the prompt.

    Attributes:
        method: the recipe's name; ``budget`` and ``codec`` are the recipe's too.
        tokens: of each row, the prompt included.
        prompt_tokens: the first ones, read as a prompt and not scored.
        kl_mean: Kullback-Leibler divergence of the compressed run's distribution from the
            uncompressed one's, KL(full || compressed), in nats.
        kl_p99: what 99 of 100 positions stay below.
        top1_agreement: share of positions at which both find the same token likeliest.
        first_divergence: for each row, tokens after the prompt on which both agree before the first
            on which they do not; None where there is no such token.
        nll: mean negative log likelihood of the given tokens in the compressed run, in nats.
        nll_full: the same without compression.
        live_tokens: tokens held a KV head, mean over layers: min, mean, max, end. Mean over rows.
        bytes: of a row, in pages that it owns: peak, time_avg and end, and ``full_bf16``, a bare
            bfloat16 cache at the end. Mean over rows.
        ratio: bytes over those of a bare bfloat16 cache of as many tokens as had been read by then
            (peak: over the one at the end). Mean over rows.
        crowded: tokens (of one layer and KV head each) that found no slot, which none should.
        per_layer: relative error (L2) of every layer's attention output, if asked for. A layer's
            error includes what the layers before it have passed on.
        kl: the divergence of every row and position.
        nlls: the compressed run's negative log likelihood of every row and position.
    """

    method: str
    budget: int | float | None
    codec: str | None
    tokens: int
    prompt_tokens: int
    kl_mean: float
    kl_p99: float
    top1_agreement: float
    first_divergence: tuple[int | None, ...]
    nll: float
    nll_full: float
    live_tokens: dict[str, float]
    bytes: dict[str, float]
    ratio: dict[str, float]
    crowded: int
    per_layer: tuple[float, ...] | None = None
    kl: np.ndarray | None = dataclasses.field(default=None, repr=False, compare=False)
    nlls: np.ndarray | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)

    @property
    def perplexity_full(self) -> float:
        return math.exp(self.nll_full)

    def as_dict(self) -> dict[str, Any]:
        """All but the single positions, ready for JSON."""
        found = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("kl", "nlls")
        }
        return found | {
            "rows": len(self.first_divergence),
            "first_divergence": list(self.first_divergence),
            "perplexity": self.perplexity,
            "perplexity_full": self.perplexity_full,
            "per_layer": None if self.per_layer is None else list(self.per_layer),
        }

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each line of a report."""
        method = [self.method]
        if self.budget is not None:
            method.append(f"budget {self.budget}")
        if self.codec is not None:
            method.append(self.codec)
        count = len(self.first_divergence)
        apart = [at for at in self.first_divergence if at is not None]
        first = f"after {min(apart):,} tokens, in {len(apart)} of {count} rows" if apart else "none"
        lines = [
            ("method", ", ".join(method)),
            (
                "tokens",
                f"{count} rows of {self.tokens:,}, the first {self.prompt_tokens:,} a prompt",
            ),
            ("KL", f"{self.kl_mean:.3g} nats, 99 % below {self.kl_p99:.3g}"),
            ("same top token", f"{self.top1_agreement:.2%}"),
            ("first divergence", first),
            ("perplexity", f"{self.perplexity:.4g} (full {self.perplexity_full:.4g})"),
            (
                "live tokens",
                f"{self.live_tokens['mean']:,.0f}, at the end {self.live_tokens['end']:,.0f}",
            ),
            (
                "bytes a row",
                f"{size(round(self.bytes['peak']))} at the peak, {self.ratio['peak']:.3f} of bf16 "
                f"(time average {self.ratio['time_avg']:.3f}, end {self.ratio['end']:.3f})",
            ),
        ]
        if self.crowded:
            lines.append(("without a slot", f"{self.crowded:,}"))
        for layer, error in enumerate(self.per_layer or ()):
            lines.append((f"layer {layer}", f"{error:.4g}"))
        return lines


@dataclasses.dataclass(frozen=True)
class Reference:
    """A pass over tokens without a cache; one serves any number of comparisons on these tokens.

    Attributes:
        ids: the tokens.
        prompt_tokens: how many of the first are a prompt.
        hidden: hidden states from which each token after the prompt is predicted, position first.
        outputs: attention outputs of every layer at the tokens that are fed, if asked for.
    """

    ids: np.ndarray
    prompt_tokens: int
    hidden: Float[Array, "N B E"]
    outputs: tuple[Float[Array, "B S Hq D"], ...] | None


def reference(
    lm: LanguageModel, tokens, *, prompt_tokens: int, per_layer: bool = False
) -> Reference:
    """Read tokens without a cache, for ``compare``, whose arguments these are.

    Raises:
        UsageError: tokens or ``prompt_tokens`` cannot be used.
        CapacityError: the rows exceed the model's context.
    """
    config, model = lm.config, lm.model
    ids = check_tokens(tokens, config.vocab_size, config.context_length)
    if not 0 < prompt_tokens < ids.shape[1]:
        raise UsageError(
            f"prompt_tokens must leave at least one of {ids.shape[1]} tokens to score, "
            f"got {prompt_tokens}"
        )
    fed = jnp.asarray(ids[:, :-1])
    positions = jnp.broadcast_to(jnp.arange(fed.shape[1], dtype=jnp.int32)[None], fed.shape)
    x, angles = _embed(model.embed, fed, positions, config=config)
    outputs = []
    for layer, window in zip(model.layers, config.windows, strict=True):
        x, out = _layer(layer, x, angles, positions, scale=config.scale, window=window)
        if per_layer:
            outputs.append(out[:, prompt_tokens:])
    hidden = _norm(model.norm, x[:, prompt_tokens - 1 :], eps=config.rms_norm_eps)
    return Reference(
        ids, prompt_tokens, hidden.swapaxes(0, 1), tuple(outputs) if per_layer else None
    )


def compare(
    lm: LanguageModel,
    tokens: Sequence[int] | Sequence[Sequence[int]] | Reference,
    *,
    recipe: Recipe,
    prompt_tokens: int | None = None,
    seed: int = 0,
    per_layer: bool = False,
    by_tick: bool = False,
) -> Comparison:
    """Feed given tokens to a compressed cache and to none, and compare what each would say next.

    The cache reads the first ``prompt_tokens`` as ``kvjax.generate`` reads a prompt. Then it gets
    one token a step, as if it had chosen it, with the maintenance where ``generate`` has it. The
    other side is one pass over all tokens without a cache, in the model's dtype: with "float32"
    every difference is the recipe's; with "bfloat16" recipe ``full`` shows what is rounding.

    Logits exist for one tick of tokens at a time; of the pass without a cache, hidden states are
    kept (and all attention outputs, with ``per_layer``).

    Args:
        lm: what ``kvjax.load`` returned.
        tokens: token ids, of one row or of several equally long ones, which are read together; or
            what ``reference`` made of them, where several recipes are compared.
        recipe: how the cache is kept.
        prompt_tokens: how many of the first tokens are a prompt; a ``Reference`` knows it.
        seed: of selectors that draw.
        per_layer: measure the error of every layer's attention output too.
        by_tick: read the tokens of a tick together. The same up to rounding (which may decide
            between two tokens that a selector finds equally good), without the decoder's own
            program, and several times as fast.

    Raises:
        UsageError: tokens or ``prompt_tokens`` cannot be used, or ``per_layer`` with ``by_tick``.
        CapacityError: the rows exceed the model's context or the memory.
    """
    if per_layer and by_tick:
        raise UsageError("per_layer looks into single steps: leave out by_tick")
    if not isinstance(tokens, Reference):
        if prompt_tokens is None:
            raise UsageError("prompt_tokens says how many of the tokens are a prompt: pass it")
        tokens = reference(lm, tokens, prompt_tokens=prompt_tokens, per_layer=per_layer)
    if prompt_tokens not in (None, tokens.prompt_tokens):
        raise UsageError(
            f"the reference has a prompt of {tokens.prompt_tokens} tokens, and {prompt_tokens=}"
        )
    if per_layer and tokens.outputs is None:
        raise UsageError("per_layer needs a reference that was made with it")
    check_model(recipe, lm)
    ids, prompt_tokens = tokens.ids, tokens.prompt_tokens
    rows, total = ids.shape
    planned = _plan(lm, recipe, rows, prompt_tokens, total)
    recipe = planned.recipe
    scores = _Scores(lm, tokens, planned)
    prompts = ids[:, :prompt_tokens].tolist()
    cache, logits = prefill_prompts(lm, empty_cache(lm, planned.geometry), prompts, recipe, seed)
    scores.add(logits[None], held(cache))
    compressing = _Phases(lm, ids, prompt_tokens, recipe)
    _feed(lm, cache, scores, compressing, recipe, seed, per_layer=per_layer, by_tick=by_tick)
    return scores.result(recipe)


def _plan(lm: LanguageModel, recipe: Recipe, rows: int, prompt: int, total: int) -> Plan:
    planned = plan(
        lm.config,
        recipe,
        batch_size=rows,
        prompt_tokens=prompt,
        max_new_tokens=total - prompt,
        dtype=lm.dtype,
        parameter_bytes=lm.nbytes,
        memory_bytes=device_memory(),
    )
    planned.check()
    return planned


def _feed(lm, cache, scores, compressing, recipe, seed, *, per_layer: bool, by_tick: bool) -> None:
    """Feed a tick of tokens at a time; the last token is not fed, it has nothing to predict."""
    ids, prompt = scores.ids, scores.prompt
    rows, total = ids.shape
    fed, steps = total - 1 - prompt, recipe.tick
    left = jnp.full(rows, fed, jnp.int32)
    state = DecodeState(cache, jnp.asarray(ids[:, prompt]), left, jnp.ones(rows, bool))
    for done in range(0, fed, steps):
        if not recipe.keeps_all:
            state = maintain(
                state,
                jnp.asarray(compressing.after(done)),
                seed_bits(seed),
                config=lm.config,
                recipe=recipe,
                done=done,
                model=lm.model,
            )
        tokens, count = _piece(ids[:, prompt:-1], done, steps)
        if by_tick:
            given = jnp.asarray(tokens), jnp.full(rows, count, jnp.int32)
            state, hidden = force_together(lm.model, state, *given, recipe=recipe)
            now = held(state.cache)
            scores.add(_logits(lm.model, hidden.swapaxes(0, 1)), now, count)
            continue
        state, logits, layers, now = force_chunk(
            lm.model,
            state,
            jnp.asarray(tokens.T),
            width=bucket(max(prompt + done + steps, NARROWEST)),
            recipe=recipe,
            with_layers=per_layer,
        )
        scores.add(logits, now, count, layers)


def _piece(ids: np.ndarray, start: int, steps: int) -> tuple[np.ndarray, int]:
    """The next ``steps`` tokens of every row, padded, and how many they are."""
    found = ids[:, start : start + steps]
    tokens = np.zeros((len(ids), steps), np.int32)
    tokens[:, : found.shape[1]] = found
    return tokens, found.shape[1]


class _Phases:
    """In which rows the recipe selects: as ``generate`` knows it, one tick after the tokens."""

    def __init__(self, lm: LanguageModel, ids: np.ndarray, prompt: int, recipe: Recipe):
        self._ids, self._prompt, self._recipe = ids, prompt, recipe
        self._rows: list[Row] = []
        evicts = recipe.selector is not None or recipe.retention is not None
        if not evicts or set(PHASES[1:]) <= set(recipe.compress):
            return
        options = Options(
            recipe=recipe,
            max_new_tokens=ids.shape[1],
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=0,
            batch_size=len(ids),
            chunk=recipe.tick,
            system_prompt=None,
            chat=False,
            thinking=None,
            repetition_stop=False,
            stop_ids=(),
        )
        for i, row in enumerate(ids):
            request = Request(i, tuple(row[:prompt].tolist()), ids.shape[1], truncated=False)
            self._rows.append(Row(lm, request, options))

    def after(self, done: int) -> np.ndarray:
        """True in the rows to be compressed once ``done`` tokens have been fed."""
        known = self._prompt + max(done - self._recipe.tick, 0) + 1
        for row, ids in zip(self._rows, self._ids, strict=bool(self._rows)):
            row.push(ids[self._prompt + len(row.tokens) : known].tolist())
        if not self._rows:
            return np.ones(len(self._ids), bool)
        return np.array([row.phase in self._recipe.compress for row in self._rows])


class _Scores:
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
        part = _score(self._lm.model, expected, logits, jnp.asarray(given))
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


@functools.partial(jax.jit, static_argnames=("config",))
def _embed(embed, tokens, positions, *, config):
    return embed[...][tokens], rotation(positions, config.rope, config.head_dim)


@functools.partial(jax.jit, static_argnames=("eps",))
def _norm(norm, x, *, eps: float):
    return rms_norm(x, norm[...], eps)


@functools.partial(jax.jit, static_argnames=("scale", "window"))
def _layer(layer, x, angles, positions, *, scale: float, window: int | None):
    """One layer over whole rows, a block of queries at a time: its output, and its attention's."""

    def attend(q, k, v, sinks):
        out, lse = causal_attention(q, k, v, positions, scale, window)
        out = add_sinks(out, lse, sinks).astype(q.dtype)
        return out, out

    return layer(x, angles, attend)


@jax.jit
def _logits(model: Decoder, hidden: Float[Array, "N B E"]) -> Float[Array, "N B V"]:
    return model.logits(hidden)


@jax.jit
def _score(
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
