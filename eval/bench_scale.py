"""Decoding and training on several GPUs against one, with random weights.

    python -m kvjax.eval.bench_scale --out eval/results/scale_one_h200.json one
    python -m kvjax.eval.bench_scale --out eval/results/scale_tp_h200.json tp
    python -m kvjax.eval.bench_scale --out eval/results/scale_dp_h200.json dp --batch 32
    python -m kvjax.eval.bench_scale --out eval/results/scale_train_h200.json train

``one``: milliseconds a decode step of Llama 3.1 8B's shape on one GPU, at batch sizes up to the
largest that fits. ``tp``: on ``--devices`` that share it. ``dp``: with as many rows on each as on
one. ``train``: tokens a second of a DynaKV update of SmolLM2-135M's shape, on one and with as many
rows on each. What is timed are the programs that users run, over whole periods of maintenance.
"""

import argparse
import dataclasses
import pathlib
import statistics
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from kvjax.eval.bench_decode import LARGEST, LLAMA_8B, largest_batch, method_of, timed
from kvjax.eval.bench_training import SMOLLM2, line, training
from kvjax.eval.random_model import random_model
from kvjax.eval.record import run_record, write_json
from kvjax.models.config import ModelConfig
from kvjax.sharding import device_bytes, device_mesh
from kvjax.sharding.across import AXIS

MOST = 512
"""Rows that the largest batch has at most: beyond, a step takes long and tells little."""
_WARM = 2


def decoding(
    config: ModelConfig,
    groups: list[list[jax.Device]],
    methods: list[str],
    batches: list[int],
    *,
    context: int,
    budget: int,
    repeats: int,
) -> Iterator[dict]:
    """Results of every method and batch size, on groups of devices with as many rows each."""
    alone = groups == [jax.devices()[:1]]
    meshes = [None if alone else Mesh(np.array(devices), (AXIS,)) for devices in groups]
    placed = [(mesh, random_model(config, mesh)) for mesh in meshes]
    for name in methods:
        recipe = method_of(name, budget)
        for batch in batches:
            rows, tp = batch, len(groups[0])
            if batch == LARGEST:
                weights = device_bytes(placed[0][1], tp)
                rows = min(largest_batch(config, recipe, weights, context, tp), MOST)
            result = {
                "method": name,
                "tp": tp,
                "dp": len(groups),
                "batch": rows,
                "context": context,
            }
            result |= {"largest": batch == LARGEST, "budget": recipe.budget}
            try:
                found = timed(config, placed, recipe, rows, context, repeats, _WARM)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                yield result | {"failed": "does not fit"}
                continue
            step_ms = statistics.median(found.raw_ms)
            held = sum(leaf.nbytes for leaf in jax.tree.leaves(found.states[0].cache))
            found = dataclasses.replace(found, states=[])  # makes room for the next one
            yield result | {
                "step_ms": step_ms,
                "tokens_per_s": 1000 * rows * len(groups) / step_ms,
                "weight_bytes_a_device": device_bytes(placed[0][1], tp),
                "cache_bytes_a_device": held // tp,
                "first_period_s": found.first_s,
                "raw_ms": found.raw_ms,
            }


def results(args: argparse.Namespace) -> Iterator[dict]:
    """What the command line asks for, one after the other."""
    count = 1 if args.part == "one" else args.devices
    devices = list(device_mesh(count).devices.flat)
    if args.part == "train":
        config = ModelConfig.from_hf(SMOLLM2 | _depth(args))
        size = {"rows": args.rows, "seq_len": args.seq_len, "repeats": args.repeats}
        for count in (1, len(devices)):
            yield training(config, devices[:count], **size)
        return
    config = ModelConfig.from_hf(LLAMA_8B | _depth(args))
    size = {"context": args.context, "budget": args.budget, "repeats": args.repeats}
    ways = {"one": [devices[:1]], "tp": [devices], "dp": [[device] for device in devices]}
    yield from decoding(config, ways[args.part], args.methods, args.batch, **size)


def _depth(args: argparse.Namespace) -> dict[str, int]:
    return {} if args.layers is None else {"num_hidden_layers": args.layers}


def _line(result: dict) -> str:
    """A result in a line."""
    if "rows_a_device" in result:
        return line(result)
    what = f"{result['method']:8} tp {result['tp']} dp {result['dp']}  batch {result['batch']:4d}"
    if "failed" in result:
        return f"{what}  {result['failed']}"
    return (
        f"{what}  {result['step_ms']:8.3f} ms/step  {result['tokens_per_s']:8.0f} tokens/s  "
        f"{result['cache_bytes_a_device'] / 2**30:6.2f} GiB of cache a device  "
        f"first {result['first_period_s']:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", help="of the code, where this runs outside a checkout")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the raw figures")
    parts = parser.add_subparsers(dest="part", required=True)
    for name in ("one", "tp", "dp", "train"):
        part = parts.add_parser(name)
        part.add_argument("--devices", type=int, default=2)
        part.add_argument("--repeats", type=int, default=5)
        part.add_argument("--layers", type=int, help="fewer than the model has")
        if name == "train":
            part.add_argument("--rows", type=int, default=8, help="of each device")
            part.add_argument("--seq-len", type=int, default=1024)
            continue
        part.add_argument(
            "--batch",
            type=int,
            nargs="+",
            default=[1, 32, LARGEST],
            help=f"of each group of devices; {LARGEST}: the largest that fits",
        )
        part.add_argument(
            "--methods", nargs="+", choices=("full", "thinkv"), default=["full", "thinkv"]
        )
        part.add_argument("--context", type=int, default=4096)
        part.add_argument("--budget", type=int, default=1024, help="of what evicts")
    args = parser.parse_args()
    record = {
        "run": run_record(args.commit) | {"devices": args.devices},
        "shape": (SMOLLM2 if args.part == "train" else LLAMA_8B) | _depth(args),
        "results": [],
    }
    for result in results(args):
        record["results"].append(result)
        print(_line(result), flush=True)
        if args.out:
            write_json(args.out, record)


if __name__ == "__main__":
    main()
