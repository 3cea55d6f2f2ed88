"""The reasoner's shape, and its attention while it is trained."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Attend, Decoder
from kvjax.train.reasoner import vocabulary

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": vocabulary.SIZE,
    "hidden_size": 256,
    "intermediate_size": 672,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 16384,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": vocabulary.BOS,
    "eos_token_id": vocabulary.EOS,
    "pad_token_id": vocabulary.PAD,
}
CHUNKS = 64
"""Parts of a row at whose starts tokens may leave the cache."""
_HIDE = 16384.0  # times the scale of the logits, still far more than any of them
_GAIN = 16.0  # of the embedding over the head, so that layers add to something


def init(config: ModelConfig, seed: int) -> nnx.State:
    """Random float32 parameters."""
    model = Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(params=seed))
    return tie(nnx.state(model))


def graph_of(config: ModelConfig) -> nnx.GraphDef:
    """What parameters are merged with to make a decoder of."""
    return nnx.graphdef(
        nnx.eval_shape(lambda: Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(params=0)))
    )


def tie(params: nnx.State) -> nnx.State:
    """The parameters with the head's, scaled, as the embedding: words are learned once.

    The architecture knows tied embeddings of one scale only, so that both are stored.
    """
    flat = dict(nnx.to_flat_state(params))
    head = flat["lm_head",][...]
    flat["embed",] = flat["embed",].replace(head * jnp.asarray(_GAIN, head.dtype))
    return nnx.from_flat_state(flat)


def attend_hiding(config: ModelConfig, leaves) -> Attend:
    """Causal attention in which keys are hidden from some chunk of the row on.

    Which chunk a query is in is written, as a one, into ``CHUNKS`` more channels of it, and into
    those of a key, where it is hidden. So any pattern goes through flash attention as it is, a
    different one for each layer and KV head, and nothing of the size [T, T] is ever made.

    Args:
        config: the model's.
        leaves: of a layer's index, the first chunk [B, T, Hkv] from which each key is hidden.
    """
    cudnn = jax.default_backend() == "gpu"
    extra = ((0, 0), (0, 0), (0, 0), (0, CHUNKS))

    def attend(index: int, cache, q, k, v, sinks):
        length, dim = q.shape[1], q.shape[3]
        here = chunk_of(jnp.arange(length, dtype=jnp.int32), length)
        marks = jax.nn.one_hot(here, CHUNKS, dtype=q.dtype)[None, :, None]
        marks = jnp.broadcast_to(marks, (*q.shape[:3], CHUNKS))
        chunks = jnp.arange(CHUNKS, dtype=jnp.int32)[None, None, None]
        hidden = chunks >= leaves(index)[..., None]
        out = jax.nn.dot_product_attention(
            jnp.concatenate([q, marks], -1),
            jnp.concatenate([k, jnp.where(hidden, -_HIDE, 0.0).astype(k.dtype)], -1),
            jnp.pad(v, extra),
            scale=config.scale,
            is_causal=True,
            implementation="cudnn" if cudnn else "xla",
        )
        return out[..., :dim], cache

    return attend


def chunk_of(position: Int[Array, "..."], length: int) -> Int[Array, "..."]:
    """The chunk of a row of ``length`` tokens that a position is in."""
    return position // -(-length // CHUNKS)


def logits(model: Decoder, tokens: Int[Array, "B T"], leaves) -> Float[Array, "B T V"]:
    """Float32 logits after every token, with `attend_hiding`."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    attend = attend_hiding(model.config, leaves)
    hidden, _ = model(tokens, positions, attend, (None,) * model.config.num_layers)
    return model.logits(hidden)
