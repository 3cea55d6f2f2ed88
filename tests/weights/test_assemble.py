import dataclasses
import json
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from kvjax.errors import ModelError
from kvjax.models.config import ModelConfig
from kvjax.weights.assemble import fingerprint, load_decoder
from kvjax.weights.checkpoint import check_finite
from kvjax.weights.safetensors import SafetensorsCheckpoint

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


class Memory:
    """A checkpoint of arrays."""

    source = "memory"

    def __init__(self, tensors: dict[str, np.ndarray]):
        self.tensors, self.names = tensors, frozenset(tensors)

    def shape(self, name):
        return self.tensors[name].shape

    def read(self, name):
        return self.tensors[name].copy()

    def digest(self, name):
        return self.tensors[name].tobytes()[:16]


def config(name: str) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((GOLDEN / name / "config.json").read_text()))


def golden(name: str) -> tuple[ModelConfig, Memory]:
    return config(name), Memory(load_file(GOLDEN / name / "model.safetensors"))


def test_fused_layouts():
    shape, checkpoint = golden("qwen2")
    model, stored = load_decoder(shape, checkpoint, "float32"), checkpoint.tensors
    dim, group = shape.head_dim, shape.group
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        qkv, bias = np.asarray(layer.attn.qkv[...]), np.asarray(layer.attn.qkv_bias[...])
        for head in range(shape.num_heads):
            rows = slice(head * dim, (head + 1) * dim)
            place = head // group, head % group
            expected = stored[prefix + "self_attn.q_proj.weight"][rows]
            np.testing.assert_array_equal(qkv[place], expected)
            np.testing.assert_array_equal(
                bias[place], stored[prefix + "self_attn.q_proj.bias"][rows]
            )
        for head in range(shape.num_kv_heads):
            rows = slice(head * dim, (head + 1) * dim)
            for place, kind in ((group, "k"), (group + 1, "v")):
                expected = stored[f"{prefix}self_attn.{kind}_proj.weight"][rows]
                np.testing.assert_array_equal(qkv[head, place], expected)
        gate_up = np.asarray(layer.mlp.gate_up[...])
        np.testing.assert_array_equal(gate_up[0], stored[prefix + "mlp.gate_proj.weight"])
        np.testing.assert_array_equal(gate_up[1], stored[prefix + "mlp.up_proj.weight"])
    assert model.lm_head is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_parameter_is_on_the_default_device_in_the_dtype_asked_for(dtype):
    leaves = jax.tree.leaves(load_decoder(*golden("qwen3"), dtype))
    assert leaves
    for leaf in leaves:
        assert leaf.dtype == dtype
        assert leaf.devices() == {jax.devices()[0]}


def test_what_is_loaded_outlives_its_source():
    shape, checkpoint = golden("llama")
    model = load_decoder(shape, checkpoint, "float32")
    expected = np.array(model.layers[0].mlp.down[...])
    for tensor in checkpoint.tensors.values():
        tensor[...] = 0
    np.testing.assert_array_equal(model.layers[0].mlp.down[...], expected)
    assert expected.any()


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_read_exactly(stored):
    shape, checkpoint = golden("llama")
    halves = {name: tensor.astype(stored) for name, tensor in checkpoint.tensors.items()}
    model = load_decoder(shape, Memory(halves), "float32")
    np.testing.assert_array_equal(
        model.embed[...], halves["model.embed_tokens.weight"].astype(np.float32)
    )


def test_missing_tensors_are_named():
    shape, checkpoint = golden("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    rest = {n: t for n, t in checkpoint.tensors.items() if n != name}
    with pytest.raises(ModelError, match=rf"memory: tensor {name} is missing") as error:
        load_decoder(shape, Memory(rest), "float32")
    assert "\n" not in str(error.value)


def test_unexpected_tensors_are_named_but_not_all_of_many():
    shape, checkpoint = golden("llama")
    extra = {f"model.layers.{i}.self_attn.q_norm.weight": np.ones(8) for i in range(5)}
    with pytest.raises(ModelError, match=r"tensors model\.layers\.0.*and 2 more are not expected"):
        load_decoder(shape, Memory(checkpoint.tensors | extra), "float32")


def test_stored_rotary_frequencies_are_no_surprise():
    shape, checkpoint = golden("llama")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    load_decoder(shape, Memory(checkpoint.tensors | extra), "float32")


@pytest.mark.parametrize("change", [{"head_dim": 16}, {"vocab_size": 97}, {"num_kv_heads": 4}])
def test_a_wrong_shape_shows_both(change):
    shape, checkpoint = golden("llama")
    wrong = dataclasses.replace(shape, **change)
    with pytest.raises(ModelError, match=r"tensor \S+ has shape \(\d.*\), expected \(\d.*\) by"):
        load_decoder(wrong, checkpoint, "float32")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_what_is_not_finite_is_refused(value, stored):
    shape, checkpoint = golden("llama")
    name = "model.layers.2.self_attn.o_proj.weight"
    bad = checkpoint.tensors[name].astype(stored)
    bad[-1, -1] = value
    with pytest.raises(ModelError, match=f"memory: tensor {name} holds NaN or infinity"):
        load_decoder(shape, Memory(checkpoint.tensors | {name: bad}), "bfloat16")


def test_what_is_not_finite_is_found_anywhere(monkeypatch):
    monkeypatch.setattr("kvjax.weights.checkpoint._CHECK_ELEMENTS", 4)
    for at in range(10):
        array = np.zeros((2, 5), np.float16)
        check_finite(array, "x", "memory")
        array.flat[at] = np.nan
        with pytest.raises(ModelError):
            check_finite(array, "x", "memory")


def test_a_stored_head_beside_tied_embeddings_must_agree():
    shape, checkpoint = golden("qwen2")
    embed = checkpoint.tensors["model.embed_tokens.weight"]
    same = checkpoint.tensors | {"lm_head.weight": embed}
    assert load_decoder(shape, Memory(same), "float32").lm_head is None
    other = checkpoint.tensors | {"lm_head.weight": embed + 1}
    with pytest.raises(ModelError, match="tie_word_embeddings to false"):
        load_decoder(shape, Memory(other), "float32")


def test_fingerprint_follows_config_and_weights_and_nothing_else():
    shape = config("llama")
    single = fingerprint(shape, SafetensorsCheckpoint(GOLDEN / "llama"))
    sharded = fingerprint(shape, SafetensorsCheckpoint(GOLDEN / "llama_sharded"))
    assert single == sharded == fingerprint(shape, SafetensorsCheckpoint(GOLDEN / "llama"))
    assert single != fingerprint(config("qwen2"), SafetensorsCheckpoint(GOLDEN / "qwen2"))
    longer = dataclasses.replace(shape, context_length=64)
    assert single != fingerprint(longer, SafetensorsCheckpoint(GOLDEN / "llama"))


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_fingerprint_sees_one_changed_tensor(tmp_path, name):
    from safetensors.numpy import save_file

    tensors = load_file(GOLDEN / "llama" / "model.safetensors")
    tensors[name] += 1e-3
    save_file(tensors, tmp_path / "model.safetensors")
    shape = config("llama")
    assert fingerprint(shape, SafetensorsCheckpoint(tmp_path)) != fingerprint(
        shape, SafetensorsCheckpoint(GOLDEN / "llama")
    )
