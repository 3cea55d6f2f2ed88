"""Writing the golden models as GGUF files, the way llama.cpp's converter does."""

import pathlib
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.numpy import load_file

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        index, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{index}.{_NAMES[part]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def metadata(config: dict[str, Any]) -> dict[str, Any]:
    """The keys, without their architecture, of a Hugging Face config."""
    heads = config["num_attention_heads"]
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim", config["hidden_size"] // heads),
        "attention.layer_norm_rms_epsilon": float(np.float32(config["rms_norm_eps"])),
        "rope.freq_base": float(config["rope_theta"]),
    }


def write(
    path: pathlib.Path,
    architecture: str,
    fields: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kinds: dict[str, GGMLQuantizationType] | None = None,
) -> pathlib.Path:
    """A GGUF file.

    Args:
        path: where it goes.
        architecture: of the model.
        fields: metadata; a key without "general." or "tokenizer." gets the architecture's prefix.
        tensors: by GGUF name.
        kinds: how to store some of the tensors, by GGUF name.
    """
    writer = GGUFWriter(path, architecture)
    for key, value in fields.items():
        whole = key if key.startswith(("general.", "tokenizer.")) else f"{architecture}.{key}"
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }[type(value)]
        add(whole, value)
    for name, tensor in tensors.items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
        else:
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def from_golden(
    golden: pathlib.Path,
    config: dict[str, Any],
    path: pathlib.Path,
    extra: dict[str, Any] | None = None,
    kinds: dict[str, GGMLQuantizationType] | None = None,
) -> pathlib.Path:
    """A golden model's safetensors as GGUF, with llama's q and k rows in its rotary order."""
    family, tensors = config["model_type"], {}
    for name, tensor in load_file(golden / "model.safetensors").items():
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            queries = ".q_proj." in name
            heads = config["num_attention_heads" if queries else "num_key_value_heads"]
            halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        tensors[gguf_name(name)] = tensor
    return write(path, family, metadata(config) | (extra or {}), tensors, kinds)
