"""Quality of every recipe on real text at budgets of 1/2, 1/4, 1/8 and 1/16 of its tokens.

    python -m kvjax.eval.bench_recipes --text FILE --out eval/results/recipes.json

SmolLM2-135M, float32, rows of consecutive tokens of FILE; the first tokens of a row are a prompt,
the others are scored. They are read a tick (16 tokens) at a time, selections coming after as many
tokens as in decoding: the same numbers up to rounding (``kvjax.compare`` with ``by_tick``, which
tests hold against single steps), several times as fast. ``--by-token`` takes single steps.

A budget counts tokens a KV head. What is drawn and compared is bytes in owned pages, beside those
of a bare bfloat16 cache; with codec "bf16", pages hold float32 here. ``random+prompt`` protects the
prompt: the control for everything that claims to find what matters. A recipe that cannot have a
budget is recorded as refused, with its reason.
"""

import argparse
import pathlib
import time
from collections.abc import Iterator

import jax

import kvjax
from kvjax.compare import Reference, compare, reference
from kvjax.errors import UsageError
from kvjax.eval.record import run_record, write_json
from kvjax.eval.text import rows_of_text, small_model
from kvjax.recipes import METHODS, Recipe

SHARES = (2, 4, 8, 16)
KEEPING = {
    "full": {"": {}},
    "uniform": {codec: {"codec": codec} for codec in ("int8", "int4", "k4v2", "int2")},
    "kivi": {codec: {"codec": codec} for codec in ("kivi4", "kivi2")},
}
"""What evicts nothing has no budget, and is there once for each codec."""
PROTECTED = "random+prompt"
NAMES = (*METHODS, PROTECTED)


def recipes_of(name: str, codecs: list[str], tokens: int) -> Iterator[tuple[dict, dict]]:
    """What is to be said of each variant of a method, and its options."""
    for codec, options in KEEPING.get(name, {}).items():
        yield {"codec": codec, "share": 1}, options
    if name in KEEPING:
        return
    own = {"protect_prompt": True} if name == PROTECTED else {}
    for codec in codecs:
        for share in SHARES:
            about = {"codec": codec, "share": share}
            yield about, {"codec": codec, "budget": tokens // share} | own


def build(name: str, options: dict) -> Recipe:
    return METHODS[name.removesuffix("+prompt")](**options)


def measure(
    lm: kvjax.LanguageModel, recipe: Recipe, text: Reference, by_token: bool, seed: int
) -> dict:
    start = time.perf_counter()
    found = compare(lm, text, recipe=recipe, by_tick=not by_token, seed=seed)
    return {"seconds": time.perf_counter() - start, **found.as_dict()}


def line(name: str, about: dict, found: dict) -> str:
    head = f"{name:14} {about['codec']:6} 1/{about['share']:<3}"
    if "refused" in found:
        return f"{head} refused: {found['refused']}"
    return (
        f"{head} {found['live_tokens']['end']:7.0f} {found['bytes']['peak']:11,.0f} "
        f"{found['bytes']['time_avg']:11,.0f} {found['ratio']['end']:6.3f} "
        f"{found['kl_mean']:9.2e} {found['kl_p99']:9.2e} {found['top1_agreement']:6.1%} "
        f"{found['perplexity']:8.3f} {found['seconds']:5.0f}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=pathlib.Path, required=True, help="a file of plain text")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024, help="of a row, its prompt included")
    parser.add_argument("--prompt-tokens", type=int, default=192)
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--codecs", nargs="+", default=["bf16", "int4"], help="of what evicts")
    parser.add_argument("--seed", type=int, default=0, help="of random eviction")
    parser.add_argument("--by-token", action="store_true", help="decode one token a step")
    parser.add_argument("--commit", help="of the code, where this runs outside a checkout")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the figures")
    return parser.parse_args()


def main() -> None:
    args = parse()
    lm = small_model()
    tokens = rows_of_text(lm, args.text, args.rows, args.tokens)
    text = reference(lm, tokens, prompt_tokens=args.prompt_tokens)
    print(f"{'method':14} {'codec':6} {'kept':5} {'live':>7} {'bytes, peak':>11}", end="")
    print(f" {'mean':>11} {'ratio':>6} {'KL':>9} {'p99':>9} {'top-1':>6} {'ppl':>8} {'s':>5}")
    record = {
        "run": run_record(args.commit),
        "model": pathlib.Path(lm.source).name,
        "dtype": "float32",
        "text": args.text.name,
        "rows": args.rows,
        "tokens": args.tokens,
        "prompt_tokens": args.prompt_tokens,
        "scored": args.rows * (args.tokens - args.prompt_tokens),
        "seed": args.seed,
        "by_token": args.by_token,
        "results": [],
    }
    for name in args.methods:
        for about, options in recipes_of(name, args.codecs, args.tokens):
            try:
                found = measure(lm, build(name, options), text, args.by_token, args.seed)
            except UsageError as error:
                found = {"refused": str(error)}
            print(line(name, about, found), flush=True)
            record["results"].append({**found, "name": name, **about})
            if args.out:
                write_json(args.out, record)
        jax.clear_caches()  # no other method has use for this one's programs


if __name__ == "__main__":
    main()
