import json
import pathlib
import shutil
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax.errors import ModelError
from kvjax.weights.safetensors import SafetensorsCheckpoint

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
INDEX = "model.safetensors.index.json"


def refused(directory: pathlib.Path) -> str:
    with pytest.raises(ModelError) as error:
        SafetensorsCheckpoint(directory)
    message = str(error.value)
    assert str(directory) in message
    assert "\n" not in message
    return message


@pytest.fixture
def sharded(tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(GOLDEN / "llama_sharded", tmp_path / "sharded"))


def edit_index(directory: pathlib.Path, change) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index)
    (directory / INDEX).write_text(json.dumps(index))


def test_shards_hold_the_same_as_one_file():
    single = SafetensorsCheckpoint(GOLDEN / "llama")
    sharded = SafetensorsCheckpoint(GOLDEN / "llama_sharded")
    assert single.names == sharded.names == set(load_file(GOLDEN / "llama/model.safetensors"))
    for name in single.names:
        assert single.shape(name) == sharded.shape(name) == single.read(name).shape
        np.testing.assert_array_equal(single.read(name), sharded.read(name))


def test_bfloat16(tmp_path):
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16)
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    read = SafetensorsCheckpoint(tmp_path).read("x")
    assert read.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(read, tensor)


def test_mxfp4_pairs_appear_as_plain_tensors_as_transformers_makes_them():
    directory = GOLDEN / "gpt_oss_mxfp4"
    checkpoint = SafetensorsCheckpoint(directory)
    assert not [name for name in checkpoint.names if name.endswith(("_blocks", "_scales"))]
    with np.load(directory / "golden.npz") as golden:
        plain = {name: golden[name] for name in golden.files if "experts" in name}
    assert plain
    for name, expected in plain.items():
        assert checkpoint.shape(name) == expected.shape
        np.testing.assert_array_equal(checkpoint.read(name), expected)


def test_mxfp4_pairs_must_match(tmp_path):
    save_file(
        {
            "a_blocks": np.zeros((2, 4, 1, 16), np.uint8),
            "a_scales": np.zeros((2, 5, 1), np.uint8),
        },
        tmp_path / "model.safetensors",
    )
    assert "a_blocks has shape (2, 4, 1, 16)" in refused(tmp_path)


def test_directory_without_weights(tmp_path):
    assert "no weights, expected model.safetensors" in refused(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_read(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n")
    message = refused(tmp_path)
    assert name in message
    assert "convert it to safetensors" in message


def test_a_gguf_file_in_the_directory_is_pointed_at(tmp_path):
    (tmp_path / "model.gguf").touch()
    assert "pass the path of the GGUF file" in refused(tmp_path)


def test_shards_without_their_index(sharded):
    (sharded / INDEX).unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refused(sharded)


@pytest.mark.parametrize("keep", [0, 4, 8, 200, 2000, -1])
def test_truncated(tmp_path, keep):
    whole = (GOLDEN / "llama/model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:keep])
    message = refused(tmp_path)
    assert "model.safetensors" in message
    assert "fetch it again" in message


def test_a_header_that_claims_more_than_the_file_holds(tmp_path):
    entry = {"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    header = json.dumps(entry).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    assert "truncated or damaged" in refused(tmp_path)
    path.write_bytes(struct.pack("<Q", 1 << 62) + header)
    assert "truncated or damaged" in refused(tmp_path)


def test_a_header_whose_shape_and_offsets_disagree(tmp_path):
    header = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert "not a whole safetensors file" in refused(tmp_path)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.float64, ml_dtypes.float8_e4m3fn])
def test_other_types_are_refused_by_name(tmp_path, dtype):
    save_file({"x": np.ones((2, 2), dtype)}, tmp_path / "model.safetensors")
    message = refused(tmp_path)
    assert "tensor x is stored as" in message
    assert "F32, F16, BF16" in message


def test_missing_shard(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    message = refused(sharded)
    assert "model-00002-of-00002.safetensors" in message
    assert "missing" in message


@pytest.mark.parametrize(
    "shard",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "sub/model.safetensors",
        "..",
        "a\\b.safetensors",
        "pytorch_model.bin",
        3,
        None,
    ],
)
def test_an_index_cannot_leave_its_directory(sharded, shard):
    shutil.copy(GOLDEN / "llama/model.safetensors", sharded.parent / "outside.safetensors")
    edit_index(sharded, lambda index: index["weight_map"].update({"model.norm.weight": shard}))
    assert repr(shard) in refused(sharded)


def test_an_index_that_names_the_wrong_shard(sharded):
    def swap(index):
        shards = sorted(set(index["weight_map"].values()))
        other = shards[index["weight_map"]["model.norm.weight"] == shards[0]]
        index["weight_map"]["model.norm.weight"] = other

    edit_index(sharded, swap)
    assert "tensor model.norm.weight is in" in refused(sharded)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', "[" * 100_000])
def test_a_broken_index(sharded, text):
    (sharded / INDEX).write_text(text)
    assert INDEX in refused(sharded)
