"""The decoder of every supported family, in Flax NNX.

A module holds parameters and nothing else. Keys and values go through the ``attend`` function that
the caller passes in, with whatever cache it threads through the layers. A parameter's ``split`` is
the axis that tensor parallel devices share (``kvjax.sharding``): a device has whole KV heads, with
their queries, and channels of the feed-forward layers, and a module takes what shapes say.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.models.config import ModelConfig
from kvjax.models.experts import Experts
from kvjax.models.layers import embedded, linear, logits_of, rms_norm, row_parallel
from kvjax.models.rope import rotate, rotation

# attend(layer index, layer cache, q [B,T,Hq,D], k [B,T,Hkv,D], v [B,T,Hkv,D], sinks f32[Hq] | None)
# -> (out [B,T,Hq,D], layer cache); q comes rotated, k at its `KeyStage`, and query head h reads KV
# head h // G.
Attend = Callable[..., tuple[Array, Any]]

KeyStage = Literal["rotated", "normed", "raw"]
"""How far keys have come when ``attend`` gets them: as queries meet them, before their rotation, or
before their norm as well (where the model has one)."""

_normal = nnx.initializers.normal(0.02)


class Attention(nnx.Module):
    """Projections to and from the heads.

    Attributes:
        qkv: [Hkv, G + 2, D, E]: for each KV head its G query heads, its key, its value.
        qkv_bias: [Hkv, G + 2, D] or None.
        out: [E, Hq * D]; out_bias: [E] or None.
        q_norm: [D] or None; k_norm: [D] or None.
        sinks: [Hq] or None.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        hidden, dim = config.hidden_size, config.head_dim
        fused = (config.num_kv_heads, config.group + 2, dim)
        self.config = config
        self.qkv = nnx.Param(_normal(rngs.params(), (*fused, hidden), dtype), split=0)
        self.qkv_bias = nnx.Param(jnp.zeros(fused, dtype), split=0) if config.qkv_bias else None
        shape = (hidden, config.num_heads * dim)
        self.out = nnx.Param(_normal(rngs.params(), shape, dtype), split=1)
        self.out_bias = nnx.Param(jnp.zeros((hidden,), dtype)) if config.out_bias else None
        self.q_norm = nnx.Param(jnp.ones((dim,), dtype)) if config.qk_norm else None
        self.k_norm = nnx.Param(jnp.ones((dim,), dtype)) if config.qk_norm else None
        sinks = (config.num_heads,)
        self.sinks = nnx.Param(jnp.zeros(sinks, dtype), split=0) if config.sinks else None

    def heads(
        self, x: Float[Array, "B T E"], *, raw_keys: bool = False
    ) -> tuple[Float[Array, "B T Hq D"], Float[Array, "B T Hkv D"], Float[Array, "B T Hkv D"]]:
        """Queries, keys and values before rotation, out of one product."""
        config = self.config
        fused = linear(x, self.qkv[...], _value(self.qkv_bias))
        q = fused[:, :, :, : config.group].reshape(*x.shape[:2], -1, config.head_dim)
        k, v = fused[:, :, :, config.group], fused[:, :, :, config.group + 1]
        if self.q_norm is not None:
            q = rms_norm(q, self.q_norm[...], config.rms_norm_eps)
            k = k if raw_keys else self.norm_keys(k)
        return q, k, v

    def norm_keys(self, k: Float[Array, "B T Hkv D"]) -> Float[Array, "B T Hkv D"]:
        """Keys behind their norm, as they are where there is none."""
        if self.k_norm is None:
            return k
        return rms_norm(k, self.k_norm[...], self.config.rms_norm_eps)

    def __call__(
        self,
        x: Float[Array, "B T E"],
        angles: tuple[Array, Array],
        attend: Attend,
        keys: KeyStage = "rotated",
    ) -> tuple[Float[Array, "B T E"], Any]:
        q, k, v = self.heads(x, raw_keys=keys == "raw")
        k = rotate(k, *angles) if keys == "rotated" else k
        sinks = None if self.sinks is None else self.sinks[...].astype(jnp.float32)
        out, cache = attend(rotate(q, *angles), k, v, sinks)
        out = out.astype(x.dtype).reshape(*x.shape[:2], -1)
        return row_parallel(out, self.out[...], _value(self.out_bias)), cache


class MLP(nnx.Module):
    """SwiGLU.

    Attributes:
        gate_up: [2, F, E], gate then up; gate_up_bias: [2, F] or None.
        down: [E, F]; down_bias: [E] or None.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        hidden, inner = config.hidden_size, config.intermediate_size
        biases = config.mlp_bias
        self.gate_up = nnx.Param(_normal(rngs.params(), (2, inner, hidden), dtype), split=1)
        self.gate_up_bias = nnx.Param(jnp.zeros((2, inner), dtype), split=1) if biases else None
        self.down = nnx.Param(_normal(rngs.params(), (hidden, inner), dtype), split=1)
        self.down_bias = nnx.Param(jnp.zeros((hidden,), dtype)) if biases else None

    def __call__(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        both = linear(x, self.gate_up[...], _value(self.gate_up_bias))
        inner = jax.nn.silu(both[:, :, 0]) * both[:, :, 1]
        return row_parallel(inner, self.down[...], _value(self.down_bias))


class Layer(nnx.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream.

    Attributes:
        input_norm: [E]; attn: Attention; post_norm: [E]; mlp: MLP or Experts.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.eps = config.rms_norm_eps
        self.input_norm = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        self.attn = Attention(config, dtype=dtype, rngs=rngs)
        self.post_norm = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        feed_forward = Experts if config.num_experts else MLP
        self.mlp = feed_forward(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T E"],
        angles: tuple[Array, Array],
        attend: Attend,
        keys: KeyStage = "rotated",
    ) -> tuple[Float[Array, "B T E"], Any]:
        out, cache = self.attn(rms_norm(x, self.input_norm[...], self.eps), angles, attend, keys)
        x = x + out
        return x + self.mlp(rms_norm(x, self.post_norm[...], self.eps)), cache


class Decoder(nnx.Module):
    """A causal language model.

    Attributes:
        embed: [V, E]; layers: one `Layer` each; norm: [E].
        lm_head: [V, E], or None where the embedding serves as the head.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        """Random parameters; under ``nnx.eval_shape``, only their shapes."""
        table = (config.vocab_size, config.hidden_size)
        self.config = config
        self.embed = nnx.Param(_normal(rngs.params(), table, dtype), split=0)
        layers = range(config.num_layers)
        self.layers = nnx.List([Layer(config, dtype=dtype, rngs=rngs) for _ in layers])
        self.norm = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        tied = config.tie_embeddings
        self.lm_head = None if tied else nnx.Param(_normal(rngs.params(), table, dtype), split=0)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
        layers: tuple,
        keys: KeyStage = "rotated",
    ) -> tuple[Float[Array, "B T E"], tuple]:
        """Read ``tokens`` at their logical ``positions``.

        Args:
            attend: called once a layer, as described at `Attend`.
            layers: what ``attend`` gets as the layer's cache, one entry a layer.
            keys: the stage at which ``attend`` gets keys.

        Returns:
            The hidden states after the final norm, and the layers' new caches.
        """
        config = self.config
        x = embedded(self.embed[...], tokens, config.vocab_size)
        angles = rotation(positions, config.rope, config.head_dim)
        caches = []
        for index, (layer, cache) in enumerate(zip(self.layers, layers, strict=True)):
            x, cache = layer(x, angles, _bind(attend, index, cache), keys)
            caches.append(cache)
        return rms_norm(x, self.norm[...], config.rms_norm_eps), tuple(caches)

    @property
    def head(self) -> Float[Array, "V E"]:
        """What scores tokens: a device's own of them, where several share them."""
        return (self.embed if self.lm_head is None else self.lm_head)[...]

    def logits(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
        """Float32 scores of the next token."""
        return logits_of(hidden, self.head, self.config.vocab_size)


def _bind(attend: Attend, index: int, cache: Any) -> Attend:
    return lambda *heads: attend(index, cache, *heads)


def _value(param: nnx.Param | None) -> Array | None:
    return None if param is None else param[...]
