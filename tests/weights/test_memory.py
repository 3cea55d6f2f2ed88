"""How much memory loading takes, measured from outside on a process that does nothing else.

What counts is RssAnon, the memory that only this process can free: safetensors are read through a
mapping of the file, whose pages count as resident (and in VmHWM) though the system drops them
whenever it needs the room.
"""

import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests import smollm2

PROGRAM = """
import sys
import jax, jax.numpy as jnp
import kvjax
from transformers import PreTrainedTokenizerFast
from kvjax import loading
# Once around with a small model, so that the compiler and the libraries are warm.
jax.block_until_ready(loading.load(sys.argv[1], dtype=sys.argv[3]).model.embed[...])
print("ready", flush=True)
sys.stdin.readline()
lm = loading.load(sys.argv[2], dtype=sys.argv[3])
leaves = jax.block_until_ready(jax.tree.leaves(lm.model))
print(sum(leaf.nbytes for leaf in leaves), flush=True)
sys.stdin.readline()
"""
ROOT = pathlib.Path(__file__).parents[2]
CONFIG = {
    "model_type": "llama",
    "vocab_size": 12288,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def resident(pid: int) -> int:
    """Bytes of anonymous memory that a process has right now."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024


def measure(path: pathlib.Path, dtype: str) -> tuple[int, int]:
    """The peak above start-up while a model is loaded, and its parameters' bytes."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(ROOT / "tests/golden/llama"), str(path), dtype],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        before = peak = resident(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        reader = subprocess.Popen(["head", "-n1"], stdin=process.stdout, stdout=subprocess.PIPE)
        while reader.poll() is None:
            peak = max(peak, resident(process.pid))
        return peak - before, int(reader.communicate()[0])
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory) -> pathlib.Path:
    """About 100 MB in float32; the embedding is the largest tensor."""
    folder, rng = tmp_path_factory.mktemp("model"), np.random.default_rng(0)
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 2, hidden),
        "self_attn.v_proj": (hidden // 2, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes = {"model.embed_tokens": (CONFIG["vocab_size"], hidden), "model.norm": (hidden,)}
    for index in range(CONFIG["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    tensors = {f"{name}.weight": rng.random(s, np.float32) for name, s in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_safetensors_needs_little_more_than_the_parameters(synthetic, dtype):
    peak, parameters = measure(synthetic, dtype)
    largest = CONFIG["vocab_size"] * CONFIG["hidden_size"] * 4
    assert parameters > 50e6
    assert peak >= parameters * 0.95, "the measurement missed the parameters themselves"
    assert peak <= parameters + 2 * largest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_smollm2_needs_little_more_than_the_parameters(dtype):
    peak, parameters = measure(smollm2.path(), dtype)
    assert parameters * 0.95 <= peak <= parameters + 2 * 49152 * 576 * 4
