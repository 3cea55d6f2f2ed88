"""Tokens a second and peak memory of a compressed cache on a CPU, against the full one.

    python -m kvjax.eval.bench_cache --out eval/results/cache_cpu.json

SmolLM2-135M-Instruct, float32, greedy, a prompt of 1,920 tokens and 128 more: 2,048 logical tokens
at the end. Each turn is a process of its own, so that its peak memory is its own too; sides take
turns, and a turn that other processes disturb is taken again.
"""

import argparse
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import time

from kvjax.eval.quiet import DISTURBED, Others, use_cores, wait_for_quiet
from kvjax.eval.record import run_record, write_json

PROMPT, NEW = 1920, 128
SIDES = {"full": ("full", {}), "int4": ("uniform", {"codec": "int4"})}


def child(side: str) -> None:
    """Decode once to compile and once to be timed; prints the second run's figures as JSON."""
    import jax

    import kvjax
    from kvjax.fetch_model import default_model_path

    # Programs are kept between turns, so that compiling does not make the peak.
    jax.config.update("jax_compilation_cache_dir", sys.argv[-1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    method, options = SIDES[side]
    lm = kvjax.load(default_model_path())
    ids = [(7919 * i) % 40000 + 100 for i in range(PROMPT)]
    for _ in range(2):
        [result] = kvjax.generate(
            lm,
            [ids],
            recipe=kvjax.recipes.METHODS[method](**options),
            max_new_tokens=NEW,
            stop_ids=(),
            repetition_stop=False,
            batch_size=1,
        )
    report = result.report
    figures = {
        "tokens_per_s": report["timing"]["decode_tok_s"],
        "peak_bytes": report["memory"]["peak_bytes"],
        "cache_bytes": report["kv"]["bytes"]["pool_allocated"],
        "live_bytes": report["kv"]["bytes"]["total_live"],
        "logical_tokens": report["kv"]["logical_tokens"],
    }
    print(json.dumps(figures))


def turn(side: str, programs: pathlib.Path) -> dict:
    command = [sys.executable, "-m", "kvjax.eval.bench_cache", "--child", side, str(programs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        others = Others([process.pid])
        time.sleep(0.2)
        out = process.stdout.read()
        meanwhile = others.cores() if process.poll() is None else 0.0
        process.wait()
    return json.loads(out) | {"cores_used_by_others": max(meanwhile, 0.0)}


def main() -> None:
    if "--child" in sys.argv:
        child(sys.argv[sys.argv.index("--child") + 1])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--patience", type=float, default=900)
    parser.add_argument("--commit", help="of the code, where this runs outside a checkout")
    parser.add_argument("--programs", type=pathlib.Path, default=pathlib.Path(".jax-programs"))
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the raw figures")
    args = parser.parse_args()
    use_cores(args.cores)
    deadline = time.monotonic() + args.patience
    for side in SIDES:
        turn(side, args.programs)  # compiles
    raw: dict[str, list[dict]] = {side: [] for side in SIDES}
    while min(map(len, raw.values())) < args.repeats and time.monotonic() < deadline:
        for side, turns in raw.items():
            wait_for_quiet([], deadline)
            turns.append(turn(side, args.programs))
            print(f"{side:5} {turns[-1]}", flush=True)
    results = {
        side: {
            "median_tokens_per_s": statistics.median(t["tokens_per_s"] for t in turns),
            "median_peak_bytes": statistics.median(t["peak_bytes"] for t in turns),
            "disturbed": sum(t["cores_used_by_others"] > DISTURBED for t in turns),
            "raw": turns,
        }
        for side, turns in raw.items()
    }
    speed = results["int4"]["median_tokens_per_s"] / results["full"]["median_tokens_per_s"]
    memory = results["int4"]["median_peak_bytes"] - results["full"]["median_peak_bytes"]
    print(f"int4 / full: {speed:.2f} of the tokens a second, {memory / 2**20:+.0f} MiB at the peak")
    if args.out:
        record = {
            "run": {**run_record(args.commit), "python": platform.python_version()},
            "prompt_tokens": PROMPT,
            "new_tokens": NEW,
            "results": results,
        }
        write_json(args.out, record)


if __name__ == "__main__":
    main()
