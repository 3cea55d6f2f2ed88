"""The benchmark of decoding with latents, on a model that takes seconds."""

import json

import numpy as np
import pytest

from kvjax.eval import bench_latents
from kvjax.eval.bench_decode import LLAMA_8B
from kvjax.eval.random_model import random_model
from kvjax.models.config import ModelConfig
from tests.eval.test_scale import SMALL

pytestmark = pytest.mark.slow


def test_results():
    """Ranks are those asked for, nothing is crowded out, and parts are less than the whole."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    config = ModelConfig.from_hf(LLAMA_8B | SMALL | heads)
    model = random_model(config)
    size = {"blocks": 8, "repeats": 2}
    found = list(bench_latents.results(config, model, ["bf16", "int4"], 2, [128], **size))
    full, plain, coded, parts, _ = found
    assert [result["method"] for result in found] == ["full"] + ["dynakv"] * 4
    assert json.loads(json.dumps(found)) == found and all(map(bench_latents.line, found))
    kept = np.ceil(bench_latents.ranks(64) / 8).mean() / 8
    for result in (plain, coded):
        assert result["crowded"] == 0 and len(result["raw_ms"]) == 2
        for name in ("key_rate", "value_rate"):
            assert abs(result[name] - kept) < 0.03
        assert result["of_full"] == full["step_ms"] / result["step_ms"]
    # Blocks of 8 components of the 272 tokens that are no longer recent, and 48 that are.
    # Of 176 tokens the stored components, of the 32 recent ones all: 2 rows, 2 layers.
    stored = 2 * 2 * 64 * ((128 + 5 * 16 - 32) * plain["key_rate"] + 32)
    np.testing.assert_allclose(plain["key_flops"], 2 * 64 * stored)
    assert coded["cache_bytes"] < plain["cache_bytes"]
    assert all(ms > 0 for name, ms in parts["parts_ms"].items() if name != "rest")
