"""Cases of the Mosaic GPU kernel, each with a time limit: a barrier that is wrong hangs a GPU.

    python -m tests.gpu.trial [--groups first long times launches covering] [--seconds 60]

One process runs the cases, another one watches it. A case that takes too long is reported, its
process ended, and a new one goes on with the next case.
"""

import argparse
import dataclasses
import functools
import queue
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.eval.bench_kernels import FORMATS, SHAPES, ours, random_pool
from pallas_kernels import paged_attention
from pallas_kernels.paged_attention.hopper.plan import Launch, unsupported
from pallas_kernels.paged_attention.mosaic import paged_attention_mosaic
from pallas_kernels.paged_attention.reference import paged_attention_reference
from tests.kernels import cases
from tests.kernels.cases import Case

WIDE = Case(head_dim=128, group=4, page=64, dtype="bfloat16", window=False, sinks=False)
FIRST = [
    dataclasses.replace(WIDE, bias="zero", lengths="few"),
    WIDE,
    *(dataclasses.replace(WIDE, fmt=fmt) for fmt in ("int8", "int4", "int2", "float int4")),
    dataclasses.replace(WIDE, fmt="int4", group=8, pools=2, window=True, sinks=True, basis=True),
    dataclasses.replace(WIDE, fmt="int8 int2", group=16, page=128, cap=True),
]
COVERING = cases.covering(**cases.HOPPER)
NAMES = ("bf16", "int8", "int4", "int2", "k4v2")
# Programs, stages and KiB of a step. Short rows have one program each, whatever is asked for.
LAUNCHES = {
    SHAPES[0]: ((264, 2, 40), (264, 3, 40), (396, 2, 40), (528, 3, 20)),
    SHAPES[1]: ((264, 3, 20), (264, 2, 40), (264, 3, 40), (264, 3, 12), (264, 4, 12)),
}
REPEATS = 5


def small(case: Case) -> str:
    problem = cases.build(case)
    reason = unsupported((problem.q,) * len(problem.pools), problem.pools, problem.tables)
    if reason:
        return f"refused: {reason}"
    fixed = {name: getattr(problem, name) for name in ("scale", "window", "soft_cap")}
    attend = functools.partial(paged_attention, implementation="mosaic", **fixed)
    arrays = {"q_pos": problem.q_pos, "sinks": problem.sinks}
    call = jax.jit(lambda q, pools, tables, arrays: attend(q, pools, tables, **arrays))
    found = jax.device_get(call(problem.q, problem.pools, problem.tables, arrays))
    error = np.abs(found[0] - cases.oracle(problem)[0]).max()
    cases.check(found, problem)
    return f"off by {error:.1e}"


def long(name: str, shape: tuple[int, int]) -> str:
    """The benchmark's rows against the reference, ten times the same bits."""
    rows, tokens = shape
    keys = jax.random.split(jax.random.key(0), 3)
    main = random_pool(keys[0], FORMATS[name], rows, 64, tokens // 64)
    recent = random_pool(keys[1], ("float", "float"), rows, 16, 3)
    pools, tables = zip(main, recent, strict=True)
    q = jax.random.normal(keys[2], (rows, 32, 128), jnp.bfloat16)
    attend = jax.jit(functools.partial(paged_attention, scale=128**-0.5, implementation="mosaic"))
    runs = [jax.device_get(attend(q, pools, tables)) for _ in range(10)]
    same = len({(out.tobytes(), lse.tobytes()) for out, lse in runs}) == 1
    worst = 0.0
    for row in range(0, rows, max(1, rows // 4)):
        one = slice(row, row + 1)
        part = (q[one],) * 2, pools, tuple(table[one] for table in tables)
        expected, lse, _ = paged_attention_reference(*part, scale=128**-0.5)
        largest = float(jnp.abs(expected).max())
        np.testing.assert_allclose(runs[0][0][one], expected, rtol=0, atol=0.02 * largest)
        np.testing.assert_allclose(runs[0][1][one], lse, rtol=0, atol=0.02)
        worst = max(worst, float(jnp.abs(runs[0][0][one] - expected).max()) / largest)
    assert same, "runs differ"
    return f"off by {worst:.1e} of the largest"


def timed(name: str, shape: tuple[int, int], page: int, implementation: str) -> str:
    attend = functools.partial(paged_attention, implementation=implementation)
    result = ours(name, *shape, page, REPEATS, attend)
    return f"{result['backend']} {result['ms']:.4f} ms, {result['bytes_per_s'] / 1e12:.2f} TB/s"


def launched(name: str, shape: tuple[int, int], numbers: tuple[int, int, int]) -> str:
    """A call of the whole op, with recent tokens and rotation."""
    programs, stages, kilobytes = numbers
    launch = Launch(programs, stages, 1024 * kilobytes)

    def attend(q, pools, tables, scale):
        options = {"q_pos": None, "window": None, "sinks": None, "scale": scale}
        return paged_attention_mosaic((q, q), pools, tables, launch=launch, **options)

    return f"{ours(name, *shape, 64, REPEATS, attend)['ms']:.4f} ms"


GROUPS = {
    "first": {f"{case}": functools.partial(small, case) for case in FIRST},
    "long": {
        f"long {name} {shape}": functools.partial(long, name, shape)
        for name, shape in (("bf16", SHAPES[0]), ("int4", SHAPES[0]), ("int4", SHAPES[1]))
    },
    "times": {
        f"{name} {shape} page {page} {by}": functools.partial(timed, name, shape, page, by)
        for shape, page in ((SHAPES[0], 64), (SHAPES[1], 64), (SHAPES[0], 128))
        for name in NAMES
        for by in ("mosaic", "triton")
    },
    "launches": {
        f"{name} {shape} {numbers}": functools.partial(launched, name, shape, numbers)
        for name in ("int8", "bf16", "int4", "int2")
        for shape, tried in LAUNCHES.items()
        for numbers in tried
    },
    "covering": {f"{case}": functools.partial(small, case) for case in COVERING},
}


def work(names: list[str]) -> None:
    """Run cases one after the other, a line each."""
    every = {name: run for group in GROUPS.values() for name, run in group.items()}
    for name in names:
        try:
            print("ok", every[name](), flush=True)
        except Exception as error:  # reported, and the next case goes on
            text = " ".join(str(error).split())
            print("FAILED", type(error).__name__, text[:400], flush=True)


def watch(names: list[str], seconds: float) -> int:
    """Have a process run the cases; the number of those that failed."""
    names, failed = list(names), 0
    while names:
        command = [sys.executable, "-m", "tests.gpu.trial", "--work", *names]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        lines: queue.Queue[str | None] = queue.Queue()

        def read(worker=worker, lines=lines):
            for line in worker.stdout:
                lines.put(line.strip())
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        limit = seconds + 60  # JAX has to start
        while names:
            try:
                line = lines.get(timeout=limit) or "FAILED process ended"
            except queue.Empty:
                line = f"FAILED no answer within {limit:.0f} s"
            print(f"{names.pop(0)}: {line}", flush=True)
            failed += line.startswith("FAILED")
            limit = seconds
            if line.startswith(("FAILED no answer", "FAILED process")):
                break
        worker.kill()
        worker.wait()
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--seconds", type=float, default=60, help="for a case")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.work)
    names = [name for group in args.groups for name in GROUPS[group]]
    failed = watch(names, args.seconds)
    print(f"{len(names)} cases, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
