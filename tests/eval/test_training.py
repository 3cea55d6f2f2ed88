"""The benchmark of DynaKV's updates: each gate, on one device and on two."""

import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kvjax.eval import bench_scale, bench_training
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from tests.eval.test_scale import SMALL

SHAPE = bench_training.SMOLLM2 | SMALL | {"num_attention_heads": 3, "num_key_value_heads": 3}


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "count"), [("token", 1), ("token", 2), ("fixed", 1)])
def test_a_training(gate, count):
    size = {"rows": 2, "seq_len": 16, "repeats": 2, "gate": gate}
    config = ModelConfig.from_hf(SHAPE)
    found = bench_training.training(config, jax.devices()[:count], **size)
    assert found["devices"] == count and len(found["raw_s"]) == 2
    assert found["tokens_per_s"] > 0 and 0 < found["utilisation"] < 1
    assert bench_scale._line(found).startswith(f"{gate:6} {count} devices")


@pytest.mark.parametrize(("gate", "million"), [("token", 578), ("layer", 565), ("fixed", 565)])
def test_operations_of_a_token_of_smollm2(gate, million):
    """134.5 million parameters; three matrices of 192 by 192 for each layer's keys and values."""
    config = ModelConfig.from_hf(bench_training.SMOLLM2)
    model = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    assert bench_training.operations(config, model, gate) == pytest.approx(1e6 * million, rel=1e-3)


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_training, "SMOLLM2", SHAPE)
    out = tmp_path / "training.json"
    size = ["--rows", "1", "--seq-len", "8", "--repeats", "1", "--layers", "1"]
    bench_training.main(["--gates", "layer", *size, "--commit", "abc", "--out", str(out)])
    record = json.loads(out.read_text())
    assert record["run"]["commit"] == "abc" and record["shape"]["num_hidden_layers"] == 1
    assert [result["gate"] for result in record["results"]] == ["layer"]
