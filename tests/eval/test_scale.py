"""The benchmark of several devices, on a model that takes seconds."""

import jax
import pytest

from kvjax.eval import bench_scale
from kvjax.models.config import ModelConfig

pytestmark = pytest.mark.slow
SMALL = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}


def test_decoding(monkeypatch):
    """One device, two that share the model, and two with rows of their own."""
    monkeypatch.setattr(bench_scale, "MOST", 3)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = ModelConfig.from_hf(bench_scale.LLAMA_8B | SMALL | heads)
    one, two = jax.devices()[:2]
    found = [
        result
        for groups in ([[one]], [[one, two]], [[one], [two]])
        for result in bench_scale.decoding(
            config,
            groups,
            ["full"],
            [1, bench_scale.LARGEST],
            context=128,
            budget=64,
            repeats=2,
        )
    ]
    assert [(r["tp"], r["dp"], r["batch"]) for r in found] == [
        (tp, dp, rows) for tp, dp in ((1, 1), (2, 1), (1, 2)) for rows in (1, 3)
    ]
    assert all(len(r["raw_ms"]) == 2 and r["step_ms"] > 0 for r in found)
    held = [r["cache_bytes_a_device"] for r in found]
    assert held[2] < 0.6 * held[0] and held[4] == held[0]
    assert all(bench_scale._line(r) for r in found)
