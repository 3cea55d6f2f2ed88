"""A small model and one set of shapes for most tests here, so that few programs are compiled."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import kvjax
from kvjax.cache import KVCache, init_cache, plan
from kvjax.decoding import prefill_chunk
from tests.models import goldens

ROWS, NEW, CHUNK, PAGE = 4, 20, 8, 16
LENGTHS = (20, 31, 17, 25)  # one bucket, ends on and off a page's edge
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95}


@functools.cache
def lm(name: str = "llama", context: int = 1 << 14) -> kvjax.LanguageModel:
    """A golden model with room for long rows, and nothing that ends an answer."""
    model = goldens.load(name)
    config = dataclasses.replace(model.config, context_length=context)
    return dataclasses.replace(model, config=config)


def changed(model: kvjax.LanguageModel, change) -> kvjax.LanguageModel:
    """The model with other parameters; ``change`` is applied to a copy of its decoder."""
    graph, state = nnx.split(model.model)
    decoder = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))
    change(decoder)
    return dataclasses.replace(model, model=decoder)


def mute() -> kvjax.LanguageModel:
    """A model that has no preference: all logits are zero."""

    def silence(decoder):
        decoder.lm_head = nnx.Param(jnp.zeros_like(decoder.lm_head[...]))

    return changed(lm(), silence)


def prompts(lengths=LENGTHS, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 95, length).tolist() for length in lengths]


def decode(prompts, model: kvjax.LanguageModel | None = None, **options) -> list[kvjax.Result]:
    """Results in the shapes that the tests share; a prompt more than 16 long belongs in it."""
    shapes = {
        "recipe": kvjax.recipes.full(PAGE),
        "max_new_tokens": NEW,
        "batch_size": ROWS,
        "chunk": CHUNK,
    }
    return kvjax.generate(model or lm(), prompts, **(shapes | options))


def tokens(prompts, *args, **options) -> list[tuple[int, ...]]:
    return [result.tokens for result in decode(prompts, *args, **options)]


@functools.cache
def usual(sampled: bool = False, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """The tokens of the usual prompts, all in one batch."""
    return tuple(tokens(prompts(), seed=seed, **(SAMPLED if sampled else {})))


def prefilled(model, prompts, pieces, bucket: int, **size) -> Iterator[tuple[KVCache, np.ndarray]]:
    """The cache and logits after each piece; a piece is a count of tokens for every row."""
    rows = len(prompts)
    request = {"prompt_tokens": 48, "max_new_tokens": 64, "page_size": 64} | size
    recipe = kvjax.recipes.full(request.pop("page_size"))
    planned = plan(
        model.config, recipe, batch_size=rows, dtype=model.dtype, parameter_bytes=0, **request
    )
    cache = init_cache(planned.geometry)
    logits = jnp.zeros((rows, model.config.vocab_size), jnp.float32)
    start = np.zeros(rows, int)
    for count in pieces:
        padded = np.full((rows, bucket), 7, np.int32)  # whatever stands in the padding
        for row, (prompt, at, new) in enumerate(zip(prompts, start, count, strict=True)):
            padded[row, :new] = prompt[at : at + new]
        cache, logits = prefill_chunk(model.model, cache, logits, padded, np.int32(count))
        start = start + count
        yield cache, np.asarray(logits)


@contextlib.contextmanager
def counting_compilations() -> Iterator[list[str]]:
    """Fills the list with one entry for every program compiled inside the block."""
    compiled: list[str] = []

    def listen(event: str, duration: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
