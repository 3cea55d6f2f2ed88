"""Quality of every codec on real text, with nothing evicted: the bits and what they cost.

    python -m kvjax.eval.bench_codecs --text FILE --out eval/results/codecs.json

SmolLM2-135M, float32, rows of consecutive tokens of FILE; the first tokens of a row are a prompt,
and the others are scored. They are read a tick (32 tokens) at a time, each attending to coded pages
and, exactly, to the recent window and the tokens of its tick before it: what a decode step sees,
and the same numbers up to rounding (``kvjax.compare`` with ``by_tick``, which tests hold against
single steps), several times as fast. ``--by-token`` takes single steps. Every codec has a recent
window of 32 tokens, as KIVI has, whose groups are as large: 32 to 63 are exact for all alike.

Bits are for one channel of one token, mean of keys and values. Payload: codes and scales. Slot:
everything that a slot holds, so bias and position too. Held: bytes of all owned pages at the end
over channels and logical tokens: with the recent window, which is float32 here, pages that are
filled in part, and tables.
"""

import argparse
import pathlib
import time

import jax.numpy as jnp

import kvjax
from kvjax.cache import ClassGeometry, Geometry
from kvjax.codecs import KVCodec, kv_codec
from kvjax.compare import Reference, compare, reference
from kvjax.eval.record import write_json
from kvjax.eval.text import record_of_text, rows_of_text, small_model
from kvjax.recipes import Recipe, uniform

CODECS = (
    "bf16",
    "fp8",
    "int8",
    "k8v4",
    "int4",
    "k4v2",
    "int2",
    "nvfp4",
    "ternary",
    "kivi4",
    "kivi2",
)
ABLATIONS = ("int4-rotation", "int4+mean", "int4+mean+balance", "int2+mean")
"""Of the basis: see ``kvjax.codecs.kv_codec``."""
WINDOW = 32


def recipe_of(codec: str) -> Recipe:
    return uniform(codec, window=WINDOW, tick=WINDOW, every=WINDOW)


def bits(codec: KVCodec, lm: kvjax.LanguageModel) -> dict[str, float]:
    """Payload and slot, in a model of bfloat16."""
    dim, heads = lm.config.head_dim, lm.config.num_kv_heads
    shape = Geometry(
        layers=(),
        rows=1,
        num_heads=lm.config.num_heads,
        num_kv_heads=heads,
        head_dim=dim,
        dtype=jnp.dtype(jnp.bfloat16),
    )
    slot = shape.slot_bytes(ClassGeometry(codec, 64, 1))
    payload = (codec.k.payload_bits(dim) + codec.v.payload_bits(dim)) / 2
    return {"payload": payload, "slot": sum(slot.values()) * 8 / (2 * dim)}


def measure(lm: kvjax.LanguageModel, name: str, text: Reference, by_token: bool) -> dict:
    start = time.perf_counter()
    found = compare(lm, text, recipe=recipe_of(name), by_tick=not by_token)
    return {
        "name": name,
        "ablation": name in ABLATIONS,
        "bits": bits(kv_codec(name), lm) | {"held": found.ratio["end"] * 16},
        "seconds": time.perf_counter() - start,
        **found.as_dict(),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=pathlib.Path, required=True, help="a file of plain text")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1152, help="of a row, its prompt included")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--codecs", nargs="+", default=[*CODECS, *ABLATIONS])
    parser.add_argument("--by-token", action="store_true", help="decode one token a step")
    parser.add_argument("--commit", help="of the code, where this runs outside a checkout")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the figures")
    return parser.parse_args()


def main() -> None:
    args = parse()
    lm = small_model()
    tokens = rows_of_text(lm, args.text, args.rows, args.tokens)
    text = reference(lm, tokens, prompt_tokens=args.prompt_tokens)
    print(f"{'codec':23} {'payload':>7} {'slot':>6} {'held':>6} {'bytes':>11}", end="")
    print(f" {'KL':>9} {'p99':>9} {'top-1':>6} {'ppl':>7} {'s':>5}")
    record = {
        **record_of_text(args, lm),
        "by_token": args.by_token,
        "results": [],
    }
    for name in args.codecs:
        found = measure(lm, name, text, args.by_token)
        record["results"].append(found)
        print(
            f"{name:23} {found['bits']['payload']:7.3f} {found['bits']['slot']:6.3f} "
            f"{found['bits']['held']:6.3f} {found['bytes']['end']:11,.0f} "
            f"{found['kl_mean']:9.2e} {found['kl_p99']:9.2e} {found['top1_agreement']:6.1%} "
            f"{found['perplexity']:7.3f} {found['seconds']:5.0f}",
            flush=True,
        )
        if args.out:
            write_json(args.out, record)
    print(f"without compression: perplexity {record['results'][0]['perplexity_full']:.3f}")


if __name__ == "__main__":
    main()
