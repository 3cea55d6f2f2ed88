"""Accuracy of the reasoner under any recipe, on problems it was not trained on.

    python -m kvjax.eval.reasoner --levels 1000 2000 --problems 256 \\
        --recipes full random:0.5 rkv:0.5 streaming:0.5 uniform::int4 --out reasoner.json

Every problem is answered greedily, and the generator knows the right answer. A recipe is
METHOD[:BUDGET[:CODEC]]. BUDGET counts tokens of the trace that a KV head may hold, as a share of
the level if it has a point (0.5) and as a number if not (256); the prompt always stays and comes on
top (its mean over the problems, since a batch has one budget). An answer that takes more than
``--limit`` times the tokens of the reference trace is wrong: else a cache that forgets could have
everything derived once more.
"""

import argparse
import pathlib
import statistics
import time

import kvjax
from kvjax.errors import KvjaxError, UsageError
from kvjax.eval.intervals import mcnemar, wilson
from kvjax.eval.record import run_record, write_json
from kvjax.recipes import Recipe, as_dict, parse
from kvjax.train.reasoner.task import WIDTHS, Problem, answer_of, problem

MODEL = pathlib.Path(__file__).parent / "models" / "reasoner"
RECIPES = ("full", "random:0.5", "snapkv_decode:0.5", "rkv:0.5", "h2o:0.5", "streaming:0.5")
KEEPING = ("full", "uniform", "kivi")


def read_recipe(spec: str, level: int, prompt: int) -> Recipe:
    """The recipe of ``METHOD[:BUDGET[:CODEC]]`` for traces and prompts of so many tokens.

    Raises:
        UsageError: it cannot work.
    """
    method, budget, codec = (*spec.split(":"), "", "")[:3]
    given = {"codec": codec or None}
    if method in KEEPING:
        if budget:
            raise UsageError(f"recipe {spec}: {method} evicts nothing, so it has no budget")
        return parse(method, **given)
    try:
        trace = round(float(budget) * level) if "." in budget else int(budget)
    except ValueError:
        raise UsageError(f"recipe {spec}: needs a budget, as in {method}:0.5") from None
    if method == "thinkv":  # which has its budget beside the prompt
        return parse(method, budget=trace, **given)
    return parse(method, budget=prompt + trace, protect_prompt=True, **given)


def answer(lm: kvjax.LanguageModel, problems: list[Problem], recipe: Recipe, args) -> dict:
    """What a recipe makes of the problems."""
    start = time.perf_counter()
    references = [len(found.tokens) - found.prompt for found in problems]
    results = kvjax.generate(
        lm,
        [list(found.tokens[: found.prompt]) for found in problems],
        recipe=recipe,
        max_new_tokens=round(args.limit * max(references)),
        batch_size=args.batch_size,
        seed=args.seed,
        chat=False,
    )
    pairs = list(zip(problems, results, strict=True))
    given = [answer_of(result.tokens) == found.answer for found, result in pairs]
    exact = [result.tokens == found.tokens[found.prompt :] for found, result in pairs]
    lengths = [len(r.tokens) / own for r, own in zip(results, references, strict=True)]
    right = [good and long <= args.limit for good, long in zip(given, lengths, strict=True)]
    ends = [result.finish_reason for result in results]
    kv = [result.report["kv"] for result in results]
    return {
        "right": sum(right),
        "interval": wilson(sum(right), len(right)),
        "late": sum(given) - sum(right),
        "exact": sum(exact),
        "length": statistics.fmean(lengths),
        "ends": {end: ends.count(end) for end in sorted(set(ends))},
        "live_tokens_max": statistics.fmean(found["live_tokens"]["max"] for found in kv),
        "ratio_peak": statistics.fmean(found["ratio"]["peak"] for found in kv),
        "seconds": time.perf_counter() - start,
        "settings": as_dict(recipe),
        "rows": [
            {"right": good, "length": long, "end": result.finish_reason}
            for good, long, result in zip(right, lengths, results, strict=True)
        ],
    }


def paired(found: dict, full: dict) -> dict:
    """The recipe's answers beside those of the full cache."""
    both = [(a["right"], b["right"]) for a, b in zip(found["rows"], full["rows"], strict=True)]
    lost, won = both.count((False, True)), both.count((True, False))
    return {"lost": lost, "won": won, "p": mcnemar(lost, won)}


def line(level: int, spec: str, found: dict) -> str:
    if "refused" in found:
        return f"{level:5} {spec:22} refused: {found['refused']}"
    count = len(found["rows"])
    low, high = found["interval"]
    beside = found.get("paired")
    full = f"  lost {beside['lost']}, won {beside['won']}, p {beside['p']:.2g}" if beside else ""
    return (
        f"{level:5} {spec:22} {found['right'] / count:6.1%} [{low:.1%}, {high:.1%}] of {count}  "
        f"late {found['late']}  exact {found['exact'] / count:.1%}  length {found['length']:.2f}  "
        f"bytes {found['ratio_peak']:.3f}  {found['seconds']:.0f} s{full}"
    )


def run(args: argparse.Namespace) -> dict:
    lm = kvjax.load(args.model, dtype=args.dtype)
    record = {
        "run": run_record(args.commit),
        "model": lm.fingerprint,
        "dtype": args.dtype,
        "problems": args.problems,
        "limit": args.limit,
        "seed": args.seed,
        "results": [],
    }
    for level in args.levels:
        problems = [problem(level, args.first + i) for i in range(args.problems)]
        prompt = round(statistics.fmean(found.prompt for found in problems))
        full = None
        for spec in args.recipes:
            try:
                recipe = read_recipe(spec, level, prompt)
                found = answer(lm, problems, recipe, args)
            except UsageError as error:
                found = {"refused": str(error)}
            if spec == "full":
                full = found
            elif full is not None and "rows" in found:
                found["paired"] = paired(found, full)
            print(line(level, spec, found), flush=True)
            record["results"].append({"level": level, "recipe": spec, "prompt": prompt, **found})
            if args.out:
                write_json(args.out, record)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, default=MODEL)
    parser.add_argument("--levels", type=int, nargs="+", choices=WIDTHS, default=[1000, 2000])
    parser.add_argument("--problems", type=int, default=256, help="of a level")
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), help="full comes first")
    parser.add_argument(
        "--limit", type=float, default=1.25, help="tokens of an answer, in references"
    )
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="of random eviction")
    parser.add_argument("--commit", help="of the code, where this runs outside a checkout")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the figures")
    try:
        run(parser.parse_args())
    except KvjaxError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
