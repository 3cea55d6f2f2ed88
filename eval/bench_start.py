"""Seconds from the start of ``kvjax.decode`` to the first character of its answer.

    python -m kvjax.eval.bench_start --out eval/results/start_cpu.json

Cold: no compiled program is kept from before. Warm: all are. SmolLM2-135M-Instruct, and the model
file is in the page cache either way. Runs that other processes disturb are repeated.
"""

import argparse
import contextlib
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from kvjax.eval.quiet import DISTURBED, Others, use_cores, wait_for_quiet
from kvjax.eval.record import run_record, write_json
from kvjax.fetch_model import default_model_path

PROMPT = "Write a short story about a lighthouse keeper and a lost whale, in two paragraphs."
COMMAND = ["-m", "kvjax.decode", "--stream", "--max-new-tokens", "32", "-p", PROMPT]


@contextlib.contextmanager
def fresh_cache(model: pathlib.Path) -> Iterator[dict[str, str]]:
    """An environment whose cache folder holds the model alone."""
    with tempfile.TemporaryDirectory() as folder:
        cache = pathlib.Path(folder, "kvjax")
        cache.mkdir()
        (cache / model.name).symlink_to(model.resolve())
        yield {**os.environ, "XDG_CACHE_HOME": folder}


def first_character(environment: dict[str, str]) -> dict[str, float]:
    """Run the command; seconds to its first character and to its end."""
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *COMMAND],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    ) as process:
        others = Others([process.pid])
        if not process.stdout.read(1):
            raise SystemExit(f"{' '.join(COMMAND)} ended with {process.wait()} and said nothing")
        first_s, meanwhile = time.perf_counter() - start, others.cores()
        process.stdout.read()
        process.wait()
    total_s = time.perf_counter() - start
    return {"first_s": first_s, "total_s": total_s, "cores_used_by_others": meanwhile}


def measure(model: pathlib.Path, repeats: int, deadline: float) -> dict[str, list[dict]]:
    """Cold and warm runs by turns, until ``repeats`` of both are undisturbed or time is over."""
    runs: dict[str, list[dict]] = {"cold": [], "warm": []}
    while not all(runs.values()) or (
        any(len(kept(each)) < repeats for each in runs.values()) and time.monotonic() < deadline
    ):
        with fresh_cache(model) as environment:
            for kind, each in runs.items():
                wait_for_quiet([os.getpid()], deadline)
                run = first_character(environment)
                each.append(run)
                shown = f"{run['first_s']:.2f} s, others {run['cores_used_by_others']:.2f} cores"
                print(f"{kind} {shown}", flush=True)
    return runs


def kept(runs: list[dict]) -> list[dict]:
    return [run for run in runs if run["cores_used_by_others"] < DISTURBED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument(
        "--patience", type=float, default=600, help="seconds to try for undisturbed runs"
    )
    parser.add_argument("--commit", help="of the code, where this runs outside a checkout")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the raw figures")
    args = parser.parse_args()
    model = default_model_path()
    if model is None:
        raise SystemExit("needs SmolLM2: python -m kvjax.fetch_model smollm2")
    cores = use_cores(args.cores)
    load_before = list(os.getloadavg())
    runs = measure(model, args.repeats, time.monotonic() + args.patience)
    results = {}
    for kind, each in runs.items():
        # Others can only make it slower, so that disturbed runs are still a bound.
        median = statistics.median(run["first_s"] for run in kept(each) or each)
        results[kind] = {"median_first_s": median, "undisturbed": len(kept(each)), "raw": each}
        print(f"{kind}: {median:.2f} s to the first character, {len(kept(each))} undisturbed runs")
    if args.out:
        record = {
            "run": {**run_record(args.commit), "python": platform.python_version()},
            "measured": " ".join(["python", *COMMAND]),
            "model": model.name,
            "cores": len(cores),
            "load_average_before": load_before,
            "results": results,
        }
        write_json(args.out, record)


if __name__ == "__main__":
    main()
