import json
import pathlib
import struct
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quantize
from safetensors.numpy import load_file

from kvjax import loading
from kvjax.errors import ModelError
from kvjax.models.config import ModelConfig
from kvjax.weights.gguf import SUPPORTED_TYPES, GGUFCheckpoint
from kvjax.weights.gguf_header import read_header
from tests import smollm2
from tests.weights import ggufs

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
Type = GGMLQuantizationType


def read_config(name: str) -> dict:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    return config | {"rope_theta": theta}


def convert(name: str, path: pathlib.Path, extra=None, **changes) -> GGUFCheckpoint:
    config = read_config(name) | {"num_key_value_heads": 4} if name == "llama_linear" else None
    config = (config or read_config(name)) | changes
    return GGUFCheckpoint(ggufs.from_golden(GOLDEN / name, config, path / "model.gguf", extra))


def refused(path: pathlib.Path) -> str:
    with pytest.raises(ModelError) as error:
        GGUFCheckpoint(path)
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["llama", "llama_yarn", "qwen2", "qwen3"])
def test_tensors_come_back_in_hugging_faces_layout(tmp_path, name):
    extra = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0} if "yarn" in name else None
    checkpoint = convert(name, tmp_path, extra)
    stored = load_file(GOLDEN / name / "model.safetensors")
    assert checkpoint.names == set(stored)
    for key, tensor in stored.items():
        assert checkpoint.shape(key) == tensor.shape
        np.testing.assert_array_equal(checkpoint.read(key), tensor)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_metadata_gives_the_same_model_as_config_json(tmp_path, name):
    config = ModelConfig.from_hf(convert(name, tmp_path).hf_config())
    assert config == ModelConfig.from_hf(read_config(name))


def test_rope_scaling_linear(tmp_path):
    expected = ModelConfig.from_hf(read_config("llama_linear"))
    new = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.5}
    for extra in (new, {"rope.scale_linear": 2.5}):
        assert ModelConfig.from_hf(convert("llama_linear", tmp_path, extra).hf_config()) == expected


def test_rope_scaling_yarn(tmp_path):
    extra = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_beta_fast": 8.0,
        "rope.scaling.yarn_beta_slow": 0.5,
    }
    rope = ModelConfig.from_hf(convert("llama_yarn", tmp_path, extra).hf_config()).rope
    assert (rope.kind, rope.factor, rope.original_context) == ("yarn", 4.0, 32)
    assert (rope.beta_fast, rope.beta_slow) == (8.0, 0.5)
    assert rope.theta == 5000.0


def llama3_frequency_factors(theta: float, dim: int, factor: float) -> np.ndarray:
    """Dimension by dimension, as llama.cpp's converter computes them."""
    factors = []
    for channel in range(0, dim, 2):
        wavelength = 2 * np.pi * theta ** (channel / dim)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def with_rope_factors(
    path: pathlib.Path, factors: np.ndarray, extra: dict[str, Any] | None = None
) -> pathlib.Path:
    config = read_config("llama") | {"rope_theta": 500_000.0}
    tensors = {
        ggufs.gguf_name(name): tensor
        for name, tensor in load_file(GOLDEN / "llama" / "model.safetensors").items()
    }
    fields = ggufs.metadata(config) | (extra or {})
    return ggufs.write(path, "llama", fields, tensors | {"rope_freqs.weight": factors})


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequency_factors_are_recognised(tmp_path, factor):
    factors = llama3_frequency_factors(500_000.0, 8, factor)
    assert len(set(factors)) > 2, "the test needs a dimension on the ramp"
    checkpoint = GGUFCheckpoint(with_rope_factors(tmp_path / "model.gguf", factors))
    rope = ModelConfig.from_hf(checkpoint.hf_config()).rope
    assert (rope.kind, rope.factor, rope.original_context) == ("llama3", factor, 8192)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)
    assert "rope_freqs.weight" not in checkpoint.names


@pytest.mark.parametrize("times", [1.01, -1, 0, np.inf, np.nan])
def test_other_frequency_factors_are_refused(tmp_path, times):
    factors = llama3_frequency_factors(500_000.0, 8, 8.0)
    factors[slice(1, 2) if times == 1.01 else slice(None)] *= times
    assert "rope_freqs.weight" in refused(with_rope_factors(tmp_path / "model.gguf", factors))


@pytest.mark.parametrize("head_dim", [6, 9, 2**31])
def test_frequency_factors_of_another_head_dim_are_refused_by_shape(
    tmp_path, monkeypatch, head_dim
):
    """Before anything of the size that the header claims is made."""
    monkeypatch.setattr("kvjax.weights.gguf_config._llama3_factors", None)
    factors = llama3_frequency_factors(500_000.0, 8, 8.0)
    extra = {"attention.key_length": head_dim}
    message = refused(with_rope_factors(tmp_path / "model.gguf", factors, extra))
    assert f"rope_freqs.weight has shape [4], expected half of the head size {head_dim}" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("attention.sliding_window", 4096),
        ("attention.scale", 0.5),
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.attn_factor", 1.5),
        ("rope.dimension_count", 4),
        ("attention.value_length", 16),
        ("some.new_key", 1),
    ],
)
def test_metadata_that_changes_the_result_is_refused_by_name(tmp_path, key, value):
    with pytest.raises(ModelError, match=rf"metadata llama\.{key} = {value!r} is not supported"):
        convert("llama", tmp_path, {key: value})


@pytest.mark.parametrize("value", [0, -4, [4, 4, 4], "4", 4.0])
def test_metadata_of_the_wrong_kind(tmp_path, value):
    if value == -4:
        value = True
    with pytest.raises(ModelError, match=r"head_count is .*, expected a positive integer"):
        convert("llama", tmp_path, {"attention.head_count": value})


@pytest.mark.parametrize("architecture", ["gpt-oss", "gemma3", "qwen3moe"])
def test_other_architectures_are_refused_by_name(tmp_path, architecture):
    path = ggufs.write(tmp_path / "m.gguf", architecture, {}, {"output_norm.weight": np.ones(4)})
    assert repr(architecture) in refused(path)


def test_a_vision_projector_is_no_language_model(tmp_path):
    fields = ggufs.metadata(read_config("llama"))
    path = ggufs.write(tmp_path / "m.gguf", "llama", fields, {"v.weight": np.ones(4, np.float32)})
    assert "token_embd.weight" in refused(path)


@pytest.mark.parametrize("kind", SUPPORTED_TYPES, ids=lambda kind: kind.name)
def test_every_type_is_read_row_slice_by_row_slice(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("kvjax.weights.gguf._SLICE_ELEMENTS", 256 * 3)  # several slices, a rest
    rng = np.random.default_rng(kind)
    raw = _random_blocks(rng, kind, rows=10, columns=256)
    path = _one_tensor(tmp_path / "m.gguf", raw, kind, (10, 256))
    read = GGUFCheckpoint(path).read("model.embed_tokens.weight")
    expected = dequantize(raw, kind)
    assert read.shape == (10, 256)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(read.astype(np.float32), expected)
    half = {Type.F16: np.float16, Type.BF16: ml_dtypes.bfloat16}
    assert read.dtype == half.get(kind, np.float32)


def _random_blocks(rng, kind: Type, rows: int, columns: int) -> np.ndarray:
    try:
        return quantize(rng.standard_normal((rows, columns), np.float32), kind).view(np.uint8)
    except NotImplementedError:  # the k-quants: any bytes will do, with scales that are finite
        block, size = GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (rows, columns // block, size), np.uint8)
        scales = slice(-2, None) if kind == Type.Q6_K else slice(0, 4)
        count = 1 if kind == Type.Q6_K else 2
        raw[..., scales] = rng.random((rows, columns // block, count)).astype("<f2").view(np.uint8)
        return raw.reshape(rows, -1)


def _one_tensor(path, raw: np.ndarray, kind: Type, shape: tuple[int, ...]) -> pathlib.Path:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "qwen2")
    for key, value in ggufs.metadata(read_config("qwen2")).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"qwen2.{key}", value)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_quantised_values_against_the_format_itself(tmp_path):
    """Q4_1 and Q8_0 decoded by hand: the two types of the model that the demo uses."""
    rng = np.random.default_rng(0)
    for kind in (Type.Q4_1, Type.Q8_0):
        raw = _random_blocks(rng, kind, 3, 64)
        path = _one_tensor(tmp_path / f"{kind.name}.gguf", raw, kind, (3, 64))
        read = GGUFCheckpoint(path).read("model.embed_tokens.weight")
        for row, blocks in enumerate(raw.reshape(3, 2, -1)):
            for index, block in enumerate(blocks):
                scale = float(block[:2].view("<f2")[0])
                if kind == Type.Q8_0:
                    numbers = scale * block[2:].view(np.int8).astype(np.float32)
                else:
                    low = float(block[2:4].view("<f2")[0])
                    nibbles = np.concatenate([block[4:] & 15, block[4:] >> 4])
                    numbers = scale * nibbles.astype(np.float32) + low
                np.testing.assert_allclose(read[row, index * 32 :][:32], numbers, rtol=1e-6)


@pytest.mark.parametrize("kind", [Type.Q2_K, Type.IQ4_NL, Type.F64, Type.MXFP4])
def test_other_types_are_refused_by_name(tmp_path, kind):
    block, size = GGML_QUANT_SIZES[kind]
    raw = np.zeros((4, 256 // block * size), np.uint8)
    message = refused(_one_tensor(tmp_path / "m.gguf", raw, kind, (4, 256)))
    assert f"model.embed_tokens.weight is stored as {kind.name}" in message
    assert "Q4_K" in message


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    fields = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.scores": [0.5, 1.5]}
    ggufs.from_golden(GOLDEN / "llama", read_config("llama"), path, fields)
    return path.read_bytes()


def test_truncated_anywhere(tmp_path, whole):
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    GGUFCheckpoint(path)
    cuts = [*range(0, 1200, 7), *range(1200, len(whole), 4999), len(whole) - 64]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        message = refused(path)
        assert "truncated or damaged" in message, (cut, message)


def test_any_damaged_byte_of_the_header_gives_a_message_or_a_model(tmp_path, whole):
    """Never a traceback, a hang or a huge allocation."""
    path, rng = tmp_path / "m.gguf", np.random.default_rng(0)
    started = time.monotonic()
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(4, 3000)] = rng.choice([0, 1, 255, rng.integers(256)])
        path.write_bytes(data)
        try:
            checkpoint = GGUFCheckpoint(path)
            for name in checkpoint.names:
                checkpoint.read(name)
        except ModelError as error:
            assert str(path) in str(error)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("count", [1 << 63, (1 << 64) - 1, 10**9])
def test_absurd_counts(tmp_path, whole, count):
    path = tmp_path / "m.gguf"
    tensors_at, keys_at = 8, 16
    tokens_at = whole.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    scores_at = whole.index(b"tokenizer.ggml.scores") + len("tokenizer.ggml.scores") + 8
    dims_at = whole.index(b"token_embd.weight") + len("token_embd.weight") + 4
    offset_at = dims_at + 2 * 8 + 4
    string_at = whole.index(b"general.architecture") - 8
    for at, message in {
        tensors_at: f"claims {count:,} tensors",
        keys_at: f"claims {count:,} metadata entries",
        tokens_at: f"'tokenizer.ggml.tokens' claims {count:,} items",
        scores_at: f"'tokenizer.ggml.scores' claims {count:,} items",
        string_at: f"a metadata key claims {count:,} bytes",
        dims_at: "tensor token_embd.weight of shape",
        offset_at: "tensor token_embd.weight of shape",
    }.items():
        path.write_bytes(whole[:at] + struct.pack("<Q", count) + whole[at + 8 :])
        started = time.monotonic()
        assert message in refused(path)
        assert time.monotonic() - started < 1


def test_layers_that_are_not_there_are_no_shape_to_plan_for(tmp_path):
    convert("llama", tmp_path, {"block_count": 4000})
    with pytest.raises(ModelError, match=r"model\.layers\.\S+ .* missing"):
        loading.read_config(tmp_path / "model.gguf")


def test_not_a_gguf_file(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "is not a GGUF file" in refused(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    assert "version 1 is not supported" in refused(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert "little-endian" in refused(path)


def test_missing_or_unreadable_file(tmp_path):
    assert "cannot be read" in refused(tmp_path / "none.gguf")
    assert "cannot be read" in refused(tmp_path)


def test_header_agrees_with_the_gguf_package(tmp_path, whole):
    from gguf import GGUFReader

    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    header, reader = read_header(path), GGUFReader(path)
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert header.metadata == fields
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert info.shape == tuple(tensor.shape[::-1].tolist())
        assert (info.kind, info.offset) == (tensor.tensor_type, tensor.data_offset)
        assert info.rows * info.row_bytes == tensor.n_bytes


def test_smollm2_header():
    checkpoint = GGUFCheckpoint(smollm2.path())
    config = ModelConfig.from_hf(checkpoint.hf_config())
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope.theta, config.context_length) == (100_000.0, 8192)
    assert (config.rms_norm_eps, config.tie_embeddings) == (1e-5, True)
    assert len(checkpoint.names) == 272
