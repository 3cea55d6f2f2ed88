"""What an update of DynaKV's training takes, and which kernels take it; random weights.

    python -m kvjax.eval.bench_training --out eval/results/training_h200.json

SmolLM2-135M's shape in bfloat16, as ``train/dynakv_smollm2.sh`` trains it: rows of ``--seq-len``
tokens, no rematerialisation, and XLA told what that script tells it if ``XLA_FLAGS`` says so.
Utilisation is that of an H200's products of bfloat16, by four operations for each parameter and
token (two to read it and two to pass the gradient on; the model's own weights have none) and what
bases and gates take. ``--profile`` also says which kernels take the time of one more update.
"""

import argparse
import pathlib
import statistics
import time

import jax
import numpy as np

from kvjax.dynakv.settings import SpectralSettings
from kvjax.dynakv.spectrum import blank, key_width
from kvjax.eval.bench_decode import MOST_KERNELS, PRODUCTS
from kvjax.eval.kernel_times import kernel_times
from kvjax.eval.random_model import random_model
from kvjax.eval.record import run_record, write_json
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.train.dynakv.settings import TrainSettings
from kvjax.train.dynakv.state import Trainer

SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
GATES = ("token", "layer", "fixed")
_RATE = 0.2  # of fixed ranks
_WARM = 3  # a command buffer is recorded in its second run


def operations(config: ModelConfig, model: Decoder, gate: str) -> float:
    """Of one token: the model's, forwards and backwards, and those of bases and gates."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(model))
    squares = 3 if gate == "token" else 2  # U, what rebuilds, and W
    beside = 2 * config.num_layers * squares * key_width(config) ** 2  # keys and values
    return 4.0 * parameters + 6.0 * beside


def training(
    config: ModelConfig,
    devices: list[jax.Device],
    *,
    rows: int,
    seq_len: int,
    repeats: int,
    gate: str = "token",
    profile: bool = False,
) -> dict:
    """Tokens a second of updates with so many rows on each device."""
    settings = TrainSettings(
        seq_len=seq_len, batch_size=rows * len(devices), grad_accum=1, remat=False
    )
    width = key_width(config)
    rank = max(round(_RATE * width), 1) if gate == "fixed" else None
    with jax.default_device(devices[0]):
        model = random_model(config)
        spectra = blank(config, SpectralSettings(gate=gate, key_rank=rank, value_rank=rank))
        control = np.array([0, 1], np.float32)
        trainer, state = Trainer.start(model, spectra, settings, control, devices)
    shape = (1, settings.batch_size, seq_len)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape).astype(np.int32)

    def update():
        nonlocal state
        state, found = trainer.update(state, tokens, np.ones(shape, bool))
        return state, found

    raw = []
    for _ in range(repeats + _WARM):
        began = time.perf_counter()
        jax.block_until_ready(update())
        raw.append(time.perf_counter() - began)
    seconds = statistics.median(raw[_WARM:])
    each = operations(config, model, gate)
    return {
        "gate": gate,
        "devices": len(devices),
        "rows_a_device": rows,
        "seq_len": seq_len,
        "tokens_per_s": tokens.size / seconds,
        "operations_a_token": each,
        "utilisation": each * tokens.size / seconds / PRODUCTS / len(devices),
        "first_step_s": raw[0],
        "raw_s": raw[_WARM:],
        "kernels": kernel_times(update)[:MOST_KERNELS] if profile else [],
    }


def line(result: dict) -> str:
    """A result in a line."""
    return (
        f"{result['gate']:6} {result['devices']} devices  {result['rows_a_device']} rows each  "
        f"{1000 * statistics.median(result['raw_s']):8.1f} ms  {result['tokens_per_s']:10,.0f} "
        f"tokens/s  {result['utilisation']:6.1%} of the peak  first {result['first_step_s']:.1f} s"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gates", nargs="+", choices=GATES, default=list(GATES))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=SMOLLM2["num_hidden_layers"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="also say which kernels take long")
    parser.add_argument("--commit", help="of the code, where this runs outside a checkout")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the raw figures")
    args = parser.parse_args(argv)
    shape = {**SMOLLM2, "num_hidden_layers": args.layers}
    size = {"rows": args.rows, "seq_len": args.seq_len, "repeats": args.repeats}
    record = {"run": run_record(args.commit), "shape": shape, "results": []}
    for gate in args.gates:
        result = training(
            ModelConfig.from_hf(shape),
            jax.devices()[:1],
            **size,
            gate=gate,
            profile=args.profile,
        )
        record["results"].append(result)
        print(line(result), flush=True)
        for kernel in result["kernels"][:20]:
            print(f"    {kernel['ms']:9.2f} ms {kernel['count']:7d} x {kernel['name']}")
        if args.out:
            write_json(args.out, record)


if __name__ == "__main__":
    main()
