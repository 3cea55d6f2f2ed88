"""Building a decoder out of a checkpoint, tensor by tensor."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from kvjax.errors import ModelError
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.sharding import shards, widened
from kvjax.sharding.program import parameter_spec
from kvjax.weights.checkpoint import Checkpoint, check_finite

_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Computed from the config wherever they are needed; old checkpoints store them all the same.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_ALIGNMENT = 64  # JAX on CPU takes over a host array as it is if it is aligned to this
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Part:
    """A stored tensor and the place it takes in a parameter."""

    name: str
    shape: tuple[int, ...]
    place: tuple[Any, ...] = ()  # index into the parameter; () is all of it
    heads: int = 0  # where the parameter may hold each of them several times


Path = tuple[str | int, ...]
Plan = dict[Path, tuple[Part, ...]]


def load_decoder(
    config: ModelConfig, checkpoint: Checkpoint, dtype: Any, mesh: Mesh | None = None
) -> Decoder:
    """A decoder with the checkpoint's weights.

    One parameter at a time is in memory besides those that are on devices.

    Args:
        config: of the checkpoint.
        checkpoint: the weights.
        dtype: of the parameters.
        mesh: the devices that share them, each of which gets its part alone; JAX's default device
            if None. Where there are more of them than KV heads, heads are copied.

    Raises:
        ModelError: a tensor is missing, unexpected, of the wrong shape, or not finite.
    """
    plan, devices = check_tensors(config, checkpoint), shards(mesh)
    own = widened(config, devices)
    abstract = nnx.eval_shape(lambda: Decoder(own, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)

    def loaded(path: Path, param: nnx.Variable) -> nnx.Variable:
        host = _parameter(plan[path], param.shape, param.dtype, checkpoint)
        if mesh is None:  # nobody else holds `host`, so on a CPU JAX may take it over
            return param.replace(jax.device_put(host))
        spread = NamedSharding(mesh, parameter_spec(param, devices))
        return param.replace(jax.make_array_from_callback(host.shape, spread, host.__getitem__))

    flat = {path: loaded(path, param) for path, param in nnx.to_flat_state(state)}
    if config.tie_embeddings and _HEAD in checkpoint.names:
        _check_tied(checkpoint)
    return nnx.merge(graph, nnx.from_flat_state(flat))


def fingerprint(config: ModelConfig, checkpoint: Checkpoint) -> str:
    """A name for config and weights, the same in every run and for every dtype they load into.

    SHA-256 over the config, and over each tensor's name, shape, stored type and a few short
    samples of its stored bytes, spread over the tensor.
    """
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True).encode())
    for name in sorted(checkpoint.names):
        digest.update(f"\n{name} {checkpoint.shape(name)} ".encode())
        digest.update(checkpoint.digest(name))
    return digest.hexdigest()


def parameter_plan(config: ModelConfig) -> Plan:
    """Which stored tensors make up each parameter of the decoder."""
    table = (config.vocab_size, config.hidden_size)
    plan: Plan = {
        ("embed",): (Part(_EMBED, table),),
        ("norm",): (Part("model.norm.weight", table[1:]),),
    }
    if not config.tie_embeddings:
        plan["lm_head",] = (Part(_HEAD, table),)
    feed_forward = _expert_parts if config.num_experts else _mlp_parts
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        for path, parts in (*_attention_parts(config), *feed_forward(config)):
            plan["layers", index, *path] = tuple(
                dataclasses.replace(part, name=prefix + part.name) for part in parts
            )
    return plan


def _attention_parts(config: ModelConfig) -> Iterator[tuple[Path, tuple[Part, ...]]]:
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    kv_heads = config.num_kv_heads
    # From the end, since fewer queries share a head that is there several times.
    heads = (("q", queries, slice(-2), 0), ("k", keys, -2, kv_heads), ("v", keys, -1, kv_heads))

    def fused(kind: str, *inner: int) -> tuple[Part, ...]:
        return tuple(
            Part(f"self_attn.{head}_proj.{kind}", (rows, *inner), (slice(None), place), copied)
            for head, rows, place, copied in heads
        )

    yield ("input_norm",), (Part("input_layernorm.weight", (hidden,)),)
    yield ("post_norm",), (Part("post_attention_layernorm.weight", (hidden,)),)
    yield ("attn", "qkv"), fused("weight", hidden)
    yield ("attn", "out"), (Part("self_attn.o_proj.weight", (hidden, queries)),)
    if config.qkv_bias:
        yield ("attn", "qkv_bias"), fused("bias")
    if config.out_bias:
        yield ("attn", "out_bias"), (Part("self_attn.o_proj.bias", (hidden,)),)
    if config.qk_norm:
        yield ("attn", "q_norm"), (Part("self_attn.q_norm.weight", (dim,)),)
        yield ("attn", "k_norm"), (Part("self_attn.k_norm.weight", (dim,)),)
    if config.sinks:
        yield ("attn", "sinks"), (Part("self_attn.sinks", (config.num_heads,)),)


def _mlp_parts(config: ModelConfig) -> Iterator[tuple[Path, tuple[Part, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size

    def fused(kind: str, *shape: int) -> tuple[Part, ...]:
        names = (f"mlp.gate_proj.{kind}", f"mlp.up_proj.{kind}")
        return tuple(Part(name, shape, (place,)) for place, name in enumerate(names))

    yield ("mlp", "gate_up"), fused("weight", inner, hidden)
    yield ("mlp", "down"), (Part("mlp.down_proj.weight", (hidden, inner)),)
    if config.mlp_bias:
        yield ("mlp", "gate_up_bias"), fused("bias", inner)
        yield ("mlp", "down_bias"), (Part("mlp.down_proj.bias", (hidden,)),)


def _expert_parts(config: ModelConfig) -> Iterator[tuple[Path, tuple[Part, ...]]]:
    experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
    for path, name, shape in (
        ("router", "router.weight", (experts, hidden)),
        ("router_bias", "router.bias", (experts,)),
        ("gate_up", "experts.gate_up_proj", (experts, hidden, 2 * inner)),
        ("gate_up_bias", "experts.gate_up_proj_bias", (experts, 2 * inner)),
        ("down", "experts.down_proj", (experts, inner, hidden)),
        ("down_bias", "experts.down_proj_bias", (experts, hidden)),
    ):
        yield ("mlp", path), (Part(f"mlp.{name}", shape),)


def check_tensors(config: ModelConfig, checkpoint: Checkpoint) -> Plan:
    """The plan of the parameters, once it is seen that the checkpoint has all that it needs.

    Raises:
        ModelError: a tensor is missing, unexpected, or of the wrong shape.
    """
    plan = parameter_plan(config)
    parts = {part.name: part for parts in plan.values() for part in parts}
    if missing := parts.keys() - checkpoint.names:
        raise ModelError(
            f"{checkpoint.source}: {_list(missing)} missing, which the model's config asks for; "
            "config and weights do not belong together, or the weights are incomplete"
        )
    extra = {name for name in checkpoint.names - parts.keys() if not _DERIVED.fullmatch(name)}
    if unexpected := extra - {_HEAD}:  # left over only where the embeddings are tied
        raise ModelError(
            f"{checkpoint.source}: {_list(unexpected)} not expected by the model's config; "
            "config and weights do not belong together, or the model has parts that kvjax lacks"
        )
    for name, part in parts.items():
        if (found := checkpoint.shape(name)) != part.shape:
            raise ModelError(
                f"{checkpoint.source}: tensor {name} has shape {found}, expected {part.shape} "
                "by the model's config; config and weights do not belong together"
            )
    return plan


def _list(names: set[str]) -> str:
    shown, more = sorted(names)[:_SHOWN], len(names) - _SHOWN
    many = "tensors" if len(names) > 1 else "tensor"
    verb = "are" if len(names) > 1 else "is"
    return f"{many} {', '.join(shown)}{f' and {more} more' if more > 0 else ''} {verb}"


def _parameter(
    parts: tuple[Part, ...], shape: tuple[int, ...], dtype: Any, checkpoint: Checkpoint
) -> np.ndarray:
    host = _aligned_empty(shape, np.dtype(dtype))
    for part in parts:
        array = checkpoint.read(part.name)
        check_finite(array, part.name, checkpoint.source)
        place = host[part.place]
        if part.heads and part.heads < len(place):
            array = array.reshape(part.heads, *place.shape[1:])
            array = np.repeat(array, len(place) // part.heads, axis=0)
        place[...] = array.reshape(place.shape).astype(dtype, copy=False)
        del array  # before the next one is read
    return host


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _check_tied(checkpoint: Checkpoint) -> None:
    if not np.array_equal(checkpoint.read(_EMBED), checkpoint.read(_HEAD)):
        raise ModelError(
            f"{checkpoint.source}: {_HEAD} differs from {_EMBED} though the config ties them "
            "(tie_word_embeddings true); set tie_word_embeddings to false in config.json"
        )
