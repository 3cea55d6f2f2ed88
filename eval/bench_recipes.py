"""Quality of every recipe on real text at 1/2, 1/4, 1/8 and 1/16 of the full cache's bytes.

    python -m kvjax.eval.bench_recipes --text FILE --out eval/results/recipes.json

SmolLM2-135M, float32, rows of consecutive tokens of FILE; the first tokens of a row are a prompt,
the others are scored. They are read a tick (16 tokens) at a time, selections coming after as many
tokens as in decoding: the same numbers up to rounding (``kvjax.compare`` with ``by_tick``, which
tests hold against single steps), several times as fast. ``--by-token`` takes single steps.

Every method gets the largest budget whose row takes no more bytes than the share: all that a model
of bfloat16 would allocate for a row (codes, scales, biases, positions, recent window, tables, last
queries), over a bare bfloat16 cache of as many tokens. ``random+prompt`` protects the prompt: the
control for everything that claims to find what matters. What cannot be had in so few bytes is
recorded as refused, with its reason; what would keep every token is left out.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.cache import Plan, plan
from kvjax.cache.plan import largest_budget, least_budget
from kvjax.compare import Reference, compare, reference
from kvjax.errors import UsageError
from kvjax.eval.record import run_record, write_json
from kvjax.eval.text import add_text_arguments, model_of, record_of_text, rows_of
from kvjax.recipes import ADAPTED, METHODS, Recipe

SHARES = (2, 4, 8, 16)
KEEPING = {
    "full": ("bf16",),
    "uniform": ("int8", "int4", "k4v2", "int2"),
    "kivi": ("kivi4", "kivi2"),
}
"""What evicts nothing has no budget, and is there once for each codec."""
PROTECTED = "random+prompt"
NAMES = (*(name for name in METHODS if name not in ADAPTED), PROTECTED)
HEAD = (
    f"{'method':14} {'codec':6} {'share':5} {'budget':>7} {'ratio':>6} {'KL':>9} {'p99':>9} "
    f"{'top-1':>6} {'ppl':>8} {'s':>5}"
)


@dataclasses.dataclass(frozen=True)
class Planner:
    """What a row of the benchmark's text would allocate in bfloat16."""

    lm: kvjax.LanguageModel
    tokens: int
    prompt_tokens: int

    def __call__(self, recipe: Recipe) -> Plan:
        return plan(
            self.lm.config,
            recipe,
            batch_size=1,
            prompt_tokens=self.prompt_tokens,
            max_new_tokens=self.tokens - self.prompt_tokens,
            dtype=jnp.bfloat16,
            parameter_bytes=0,
        )

    def full_bytes(self) -> int:
        return self(METHODS["full"]()).geometry.full_token_bytes * self.tokens

    def of_share(self, recipe: Recipe, share: int) -> Recipe | None:
        """The recipe with the largest budget of so many bytes; None if that is every token.

        Raises:
            UsageError: not even the smallest budget fits.
        """
        limit = self.full_bytes() // share
        least = least_budget(recipe, self.prompt_tokens, self.tokens - self.prompt_tokens)
        budget = largest_budget(recipe, limit, self, least)
        if budget is None:
            needed = self(dataclasses.replace(recipe, budget=least)).geometry.row_bytes
            raise UsageError(f"{least} tokens, the fewest, take {needed:,} bytes of {limit:,}")
        return None if budget >= self.tokens else dataclasses.replace(recipe, budget=budget)


def variants(name: str, codecs: list[str]) -> Iterator[tuple[Recipe, int]]:
    """The recipes of a method, and the shares of the bytes that each is to have."""
    method = METHODS[name.removesuffix("+prompt")]
    if name == "full":
        yield method(), 1
    elif name in KEEPING:
        yield from ((method(codec), 1) for codec in KEEPING[name])
    elif name == "thinkv":  # which has codecs of its own; the model has no calibration
        yield from ((method(), share) for share in SHARES)
    else:
        own = {"protect_prompt": True} if name == PROTECTED else {}
        yield from ((method(codec=codec, **own), share) for codec in codecs for share in SHARES)


def measure(
    planner: Planner, recipe: Recipe, share: int, text: Reference, args: argparse.Namespace
) -> dict | None:
    """Figures of one recipe; None where it would keep every token."""
    start = time.perf_counter()
    try:
        if share > 1:
            recipe = planner.of_share(recipe, share)
        if recipe is None:
            return None
        found = compare(planner.lm, text, recipe=recipe, by_tick=not args.by_token, seed=args.seed)
    except UsageError as error:
        return {"refused": str(error)}
    held = planner(recipe).geometry.row_bytes
    return {
        "seconds": time.perf_counter() - start,
        "row_bytes": held,
        "row_ratio": held / planner.full_bytes(),
        "kl_rows": np.asarray(found.kl).mean(1).tolist(),
        **found.as_dict(),
    }


def line(name: str, codec: str, share: int, found: dict) -> str:
    head = f"{name:14} {codec:6} 1/{share:<3}"
    if "refused" in found:
        return f"{head} refused: {found['refused']}"
    return (
        f"{head} {found['budget'] or 'all':>7} {found['row_ratio']:6.3f} "
        f"{found['kl_mean']:9.2e} {found['kl_p99']:9.2e} {found['top1_agreement']:6.1%} "
        f"{found['perplexity']:8.3f} {found['seconds']:5.0f}"
    )


def run(args: argparse.Namespace) -> dict:
    """Measure every variant, telling each as it comes."""
    lm = model_of(args)
    planner = Planner(lm, args.tokens, args.prompt_tokens)
    tokens = rows_of(args, lm)
    text = reference(lm, tokens, prompt_tokens=args.prompt_tokens)
    record = {
        **record_of_text(args, lm),
        "seed": args.seed,
        "by_token": args.by_token,
        "results": [],
    }
    for name in args.methods:
        for recipe, share in variants(name, args.codecs):
            codec = recipe.codec or "bf16"
            found = measure(planner, recipe, share, text, args)
            if found is None:
                continue
            print(line(name, codec, share, found), flush=True)
            record["results"].append({**found, "name": name, "codec": codec, "share": share})
            if args.out:
                write_json(args.out, record)
    return record


def run_side_by_side(args: argparse.Namespace) -> dict:
    """The same, each method in a process of its own: most of the time goes into compilation."""
    with tempfile.TemporaryDirectory() as folder:

        def one(name: str) -> dict:
            part = pathlib.Path(folder) / f"{name}.json"
            own = ["--jobs", "1", "--methods", name, "--out", str(part)]
            command = [sys.executable, "-m", "kvjax.eval.bench_recipes", *sys.argv[1:], *own]
            subprocess.run(command, check=False)  # what it has measured by then counts
            return json.loads(part.read_text())

        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            parts = list(pool.map(one, args.methods))
    results = [result for part in parts for result in part["results"]]
    return {**parts[0], "run": run_record(args.commit), "results": results}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_text_arguments(parser, 2, 1024, 192)
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--codecs", nargs="+", default=["bf16", "int4"], help="of what evicts")
    parser.add_argument("--seed", type=int, default=0, help="of random eviction")
    parser.add_argument("--by-token", action="store_true", help="decode one token a step")
    parser.add_argument("--jobs", type=int, default=1, help="methods measured at a time")
    parser.add_argument("--commit", help="of the code, where this runs outside a checkout")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the figures")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.jobs == 1:
        print(HEAD, flush=True)
    record = run_side_by_side(args) if args.jobs > 1 else run(args)
    if args.out:
        write_json(args.out, record)


if __name__ == "__main__":
    main()
