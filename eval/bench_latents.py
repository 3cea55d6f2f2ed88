"""Milliseconds a decode step takes with DynaKV's latents, and where they go; random weights.

    python -m kvjax.eval.bench_latents --out eval/results/latents_h200.json
    python -m kvjax.eval.bench_latents --context 8192 --codecs int4 --out latents_int4.json

Bases are orthogonal, and gates give tokens ranks from ``RANKS[0]`` to ``RANKS[1]`` of the
components, evenly and whatever the model makes, so that 0.3 of them are stored before ranks are
rounded up to blocks. Steps are timed as ``kvjax.eval.bench_decode`` does, beside `full` in the same
run. Parts of a step are then timed alone, over the first layers of the same cache: what makes
latents, the store of the new token's, attention, and of that the products of keys and of values.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import statistics
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import KVCache, append, held_latents, reserve_layer, store
from kvjax.decoding.chunk import DecodeState
from kvjax.dynakv.cached import as_stored, attend_step, in_blocks, latents
from kvjax.dynakv.coder import Coder
from kvjax.dynakv.mask import prefix
from kvjax.dynakv.projector import BLOCKS, HEAD_ROOM, Projector
from kvjax.dynakv.settings import SpectralSettings
from kvjax.dynakv.spectrum import LayerSpectra, SpectralGate, Spectrum, key_width
from kvjax.eval.bench_decode import LLAMA_8B, timed
from kvjax.eval.bench_kernels import measure
from kvjax.eval.filled import empty, filled, standing
from kvjax.eval.random_model import random_model
from kvjax.eval.record import run_record, write_json
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.models.rope import inverse_frequencies
from kvjax.recipes import Recipe, full
from kvjax.recipes.methods import LATENT_PAGE
from kvjax.sharding import per_shard
from pallas_kernels.latent_attention import triton, xla
from pallas_kernels.latent_attention.layout import Rotary

RANKS = (0.1, 0.5)
"""The smallest and the largest rank, as shares of the components."""
KINDS = 64
"""Ranks that a token can have."""

FEW = 4
"""Layers whose parts are timed: more than fit a GPU's second cache."""
LAUNCHES = ((64, 4, 2, 128), (64, 4, 3, 128), (128, 8, 2, 128))
"""Other launches of the keys' kernel, timed beside its own."""
SHARES = (128, 256)
"""Slots of values that programs of other launches add up."""
_PIECE = 2048  # tokens that are stored at a time
_STEPS = 8  # of parts, inside one program
_STEP_PARTS = ("latents", "store", "attention", "maintenance")  # keys and values are attention's


def recipe_of(codec: str, blocks: int) -> Recipe:
    """DynaKV with an adapter that is not on disk."""
    settings = SpectralSettings(inverse="orthogonal")
    share = min(HEAD_ROOM * (sum(RANKS) / 2 + 0.5 / blocks), 1.0)
    projector = Projector("random", "", "random", "", settings, blocks, ((share, share),))
    return Recipe("dynakv", projector=projector, page_size=LATENT_PAGE, codec=codec)


def ranks(width: int) -> np.ndarray:
    """The ranks that tokens have."""
    return np.linspace(*RANKS, KINDS, dtype=np.float64) * width // 1


def random_spectra(key, width: int, settings: SpectralSettings) -> LayerSpectra:
    """Orthogonal bases, and gates that choose any of `ranks` for a token."""

    def spectrum(key):
        basis, gate = jax.random.split(key)
        u = jax.random.orthogonal(basis, width)
        ends = jnp.asarray(ranks(width), jnp.int32) - 1
        own = Spectrum(u, jnp.zeros(width), settings, None)
        # The largest of many random numbers, by far: of whatever size the components are.
        w = 100.0 * jax.random.normal(gate, (width, KINDS))
        own.w = SpectralGate(jnp.zeros((width, width)).at[:, ends].set(w))
        own.b = SpectralGate(jnp.full(width, -1e9).at[ends].set(0.0))
        return own

    return LayerSpectra(*map(spectrum, jax.random.split(key)))


def random_latents(key, width: int, shape: tuple[int, ...], dtype):
    """Components of tokens at random ranks: [*shape, d]."""
    numbers, kinds = jax.random.split(key)
    rank = jnp.asarray(ranks(width), jnp.int32)[jax.random.randint(kinds, shape, 0, KINDS)]
    x = jax.random.normal(numbers, (*shape, width), dtype)
    return jnp.where(prefix(rank, width), x, 0)


def filled_with_latents(
    config: ModelConfig, recipe: Recipe, rows: int, context: int, steps: int, tp: int = 1
) -> DecodeState:
    """Every row at ``context`` tokens of random latents, stored as decoding stores them."""
    width = key_width(config)
    settings = recipe.projector.in_blocks(width)
    length = jnp.full(rows, context, jnp.int32)
    left = context - recipe.window  # tokens that are no longer recent

    @functools.partial(jax.jit, donate_argnames="layer")
    @per_shard
    def begin(layer, key):
        spectra, recent = jax.random.split(key)
        coder = Coder.of(random_spectra(spectra, width, settings), jnp.bfloat16)
        layer = dataclasses.replace(layer, coder=coder)
        layer = reserve_layer(layer, length)
        x = random_latents(recent, width, (rows, recipe.window, 2), jnp.bfloat16)
        pos = jnp.broadcast_to(left + jnp.arange(recipe.window, dtype=jnp.int32), x.shape[:2])
        return append(layer, *as_stored(x), pos, jnp.ones(pos.shape, bool))

    @functools.partial(jax.jit, donate_argnames="layer")
    @per_shard
    def piece(layer, key, start):
        x = random_latents(key, width, (rows, 2, min(_PIECE, left)), jnp.bfloat16)
        pos = start + jnp.arange(x.shape[2], dtype=jnp.int32)
        pos = jnp.broadcast_to(pos[None], (rows, len(pos)))
        keep = jnp.broadcast_to((pos < left)[:, None], x.shape[:3])
        x, keep = in_blocks(layer, 1, x, keep)
        layer, placed = store(layer, 1, x, jnp.zeros((*x.shape[:3], 0), x.dtype), pos, keep)
        return layer, (keep & ~placed).sum((1, 2), dtype=jnp.int32)

    cache = empty(config, recipe, rows, context + steps, tp)
    layers, lost = [], jnp.zeros(rows, jnp.int32)
    for index, layer in enumerate(cache.layers):
        key = jax.random.fold_in(jax.random.key(2), index)
        layer = begin(layer, key)
        for start in range(0, left, _PIECE):
            layer, crowded = piece(layer, jax.random.fold_in(key, start), jnp.int32(start))
            lost += crowded
        layers.append(layer)
    cache = dataclasses.replace(cache, crowded=lost)
    return standing(cache, tuple(layers), rows, context, recipe.window, steps)


def parts(config: ModelConfig, cache: KVCache, repeats: int) -> dict[str, float]:
    """Milliseconds a step spends in parts of itself, by those of the first layers."""
    few = cache.layers[:FEW]
    rows, width = len(cache.length), key_width(config)
    backend = triton if jax.default_backend() == "gpu" else xla
    keys = jax.random.split(jax.random.key(3), 4)
    dim, kv_heads = config.head_dim, config.num_kv_heads
    q = jax.random.normal(keys[0], (rows, config.num_heads, dim), jnp.bfloat16)
    x = jax.random.normal(keys[1], (rows, 1, kv_heads, dim), jnp.bfloat16)
    latent = random_latents(keys[2], width, (rows, 1, 2), jnp.bfloat16)
    span = few[0].span
    weights = jax.random.uniform(keys[3], (rows, kv_heads, config.num_heads // kv_heads, span))
    frequencies, factor = inverse_frequencies(config.rope, dim)
    rotary = Rotary(jnp.asarray(frequencies), factor)
    pos = cache.length

    def attention(layer, q):
        given = {"q_pos": pos, "span": span, "window": None, "sinks": None}
        return q + (attend_step(layer, q, list(layer.tables), config, **given) * 1e-3).astype(
            q.dtype
        )

    def key_products(layer, q, **how):
        grouped = q.reshape(rows, kv_heads, -1, dim)
        held = layer.pools, layer.tables, layer.coder.keys, rotary, span
        logits, live = backend.latent_logits(grouped, *held, **how)
        seen = jnp.where(live[:, None], logits, 0).sum(2, keepdims=True)
        return q + (seen * 1e-9).astype(q.dtype)

    def value_products(layer, weights, **how):
        sums = backend.latent_sums(weights, layer.pools, layer.tables, width, **how)
        return weights + sums.sum(-1, keepdims=True).swapaxes(0, 1) * 1e-9

    def making(layer, x):
        made = latents(layer.coder, x, x, x.dtype)[:, :, 0].reshape(x.shape)
        return x + made * 1e-3

    def storing(layer, latent):
        return append(layer, *as_stored(latent), pos[:, None], jnp.ones((rows, 1), bool))

    tried = {} if backend is xla else {str(n): triton.Launch(*n) for n in LAUNCHES}
    shares = () if backend is xla else SHARES
    found = {}
    leaves, kind = jax.tree.flatten(few)
    for name, part, state in (
        ("latents", making, x),
        ("attention", attention, q),
        ("keys", key_products, q),
        ("values", value_products, weights),
        *(
            (f"keys {text}", functools.partial(key_products, launch=launch), q)
            for text, launch in tried.items()
        ),
        *((f"values {n}", functools.partial(value_products, share=n), weights) for n in shares),
    ):

        def step(_, state, *leaves, part=part):
            for layer in jax.tree.unflatten(kind, leaves):
                state = part(layer, state)
            return state

        found[name] = measure(step, repeats, state, *leaves, calls=_STEPS)["ms"]

    recent = [  # nothing else, for what is changed is copied once
        dataclasses.replace(
            layer, pools=layer.pools[:1], tables=layer.tables[:1], free=(), coder=None
        )
        for layer in few
    ]
    leaves, kind = jax.tree.flatten(recent)

    def every_store(_, leaves, latent):
        return jax.tree.leaves([storing(x, latent) for x in jax.tree.unflatten(kind, leaves)])

    found["store"] = measure(every_store, repeats, leaves, latent, calls=_STEPS)["ms"]
    return {name: ms * config.num_layers / len(few) for name, ms in found.items()}


def sizes(config: ModelConfig, cache: KVCache) -> dict[str, float]:
    """What a step's attention reads and computes, of all rows and layers."""
    width, total = key_width(config), dict.fromkeys(("key_flops", "key_bytes", "value_bytes"), 0.0)
    for layer in cache.layers:
        for pool, table in zip(layer.pools, layer.tables, strict=True):
            live = (pool.pos[table] >= 0).sum((0, 2, 3), dtype=jnp.int32).astype(float)
            scale = 0 if pool.k_scale is None else pool.k_scale.nbytes
            each = (pool.k.nbytes + pool.pos.nbytes + scale) / pool.pos.size
            total["key_flops"] += 2 * pool.components * width * float(live[0::2].sum())
            total["key_bytes"] += each * float(live[0::2].sum())
            total["value_bytes"] += each * float(live[1::2].sum())
    own = held_latents(cache)  # [B, L, 4]
    stored = np.asarray(own[..., 2:], float).sum((0, 1)) / (float(own[..., 1].sum()) * width)
    return total | {"key_rate": float(stored[0]), "value_rate": float(stored[1])}


def results(
    config: ModelConfig,
    model: Decoder,
    codecs: list[str],
    rows: int,
    contexts: list[int],
    *,
    blocks: int,
    repeats: int,
) -> Iterator[dict]:
    """`full` and DynaKV with each codec at every length, and then where DynaKV's time goes."""
    plain: dict[int, float] = {}
    taken = []
    for context, codec in itertools.product(contexts, (None, *codecs)):
        recipe = full() if codec is None else recipe_of(codec, blocks)
        fill = filled if codec is None else filled_with_latents
        found = timed(config, [(None, model)], recipe, rows, context, repeats, fill=fill)
        [state] = found.states
        step_ms, upkeep_ms = statistics.median(found.raw_ms), found.upkeep_ms
        result = {
            "method": recipe.name,
            "batch": rows,
            "context": context,
            "step_ms": step_ms,
            "tokens_per_s": 1000 * rows / step_ms,
            "cache_bytes": state.cache.nbytes(),
            "first_period_s": found.first_s,
            "raw_ms": found.raw_ms,
        }
        del found  # makes room
        if codec is None:
            plain[context] = step_ms
        else:
            result |= {"codec": codec, "blocks": blocks, "of_full": plain[context] / step_ms}
            result |= {"crowded": int(state.cache.crowded.sum())} | sizes(config, state.cache)
            result["upkeep_ms"] = upkeep_ms
            taken.append((result, state.cache))
        yield result
    while taken:
        yield taken_apart(config, *taken.pop(0), repeats)


def taken_apart(config: ModelConfig, result: dict, cache: KVCache, repeats: int) -> dict:
    """Where the time of a step goes, that took as long as the result says."""
    ms = parts(config, cache, repeats) | {"maintenance": result["upkeep_ms"]}
    ms["rest"] = result["step_ms"] - sum(ms[name] for name in _STEP_PARTS)
    same = {name: result[name] for name in ("method", "codec", "batch", "context")}
    return same | {
        "parts_ms": ms,
        "key_tflops": result["key_flops"] / ms["keys"] / 1e9,
        "key_gb_per_s": result["key_bytes"] / ms["keys"] / 1e6,
        "value_gb_per_s": result["value_bytes"] / ms["values"] / 1e6,
    }


def line(result: dict) -> str:
    """A result in a line."""
    if "parts_ms" in result:
        ms = ", ".join(f"{name} {value:.3f}" for name, value in result["parts_ms"].items())
        what = f"dynakv {result['codec']:5} {result['context']:6d} tokens"
        return (
            f"{what}  ms of a step: {ms}\n  keys are rebuilt at {result['key_tflops']:.1f} "
            f"TFLOP/s, {result['key_gb_per_s']:.0f} GB/s; values are read at "
            f"{result['value_gb_per_s']:.0f} GB/s"
        )
    name = result["method"] if "codec" not in result else f"dynakv {result['codec']}"
    text = (
        f"{name:12} {result['context']:6d} tokens  {result['step_ms']:8.3f} ms/step  "
        f"{result['tokens_per_s']:8.0f} tokens/s  {result['cache_bytes'] / 2**30:6.2f} GiB"
    )
    if "of_full" in result:
        text += (
            f"  {result['of_full']:.3f} of full, stored {result['key_rate']:.3f} of keys, "
            f"{result['value_rate']:.3f} of values, crowded {result['crowded']}"
        )
    return f"{text}  first {result['first_period_s']:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--codecs", nargs="+", default=["bf16"], help="of latents")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="that a latent is cut into")
    parser.add_argument("--layers", type=int, default=LLAMA_8B["num_hidden_layers"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--commit", help="of the code, where this runs outside a checkout")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the raw figures")
    args = parser.parse_args()
    shape = {**LLAMA_8B, "num_hidden_layers": args.layers}
    config = ModelConfig.from_hf(shape)
    model = random_model(config)
    record = {"run": run_record(args.commit), "shape": shape, "ranks": RANKS}
    record["results"] = []
    size = {"blocks": args.blocks, "repeats": args.repeats}
    for result in results(config, model, args.codecs, args.batch, args.context, **size):
        record["results"].append(result)
        print(line(result), flush=True)
        if args.out:
            write_json(args.out, record)


if __name__ == "__main__":
    main()
