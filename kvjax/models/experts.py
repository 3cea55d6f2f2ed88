"""The mixture of experts of GPT-OSS."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.models.config import ModelConfig
from kvjax.models.layers import linear, precision
from kvjax.sharding.across import here_once, summed


class Experts(nnx.Module):
    """A router and its experts, each token through ``experts_per_token`` of them.

    Attributes:
        router: [X, E], router_bias: [X].
        gate_up: [X, E, 2F], gate and up projections interleaved; gate_up_bias: [X, 2F].
        down: [X, F, E], down_bias: [X, E].
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        normal = nnx.initializers.normal(0.02)
        self.config = config
        self.router = nnx.Param(normal(rngs.params(), (experts, hidden), dtype))
        self.router_bias = nnx.Param(jnp.zeros((experts,), dtype))
        shape = (experts, hidden, 2 * inner)
        self.gate_up = nnx.Param(normal(rngs.params(), shape, dtype), split=2)
        self.gate_up_bias = nnx.Param(jnp.zeros((experts, 2 * inner), dtype), split=1)
        self.down = nnx.Param(normal(rngs.params(), (experts, inner, hidden), dtype), split=1)
        self.down_bias = nnx.Param(jnp.zeros((experts, hidden), dtype))

    def __call__(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Sort the tokens by expert, so that each expert reads its own as one matrix."""
        tokens = x.reshape(-1, x.shape[-1])
        experts, weights = self.route(tokens)
        experts = experts.reshape(-1)
        order = jnp.argsort(experts)
        chosen = experts[order]
        counts = jnp.bincount(experts, length=self.config.num_experts).astype(jnp.int32)
        rows = tokens[order // self.config.experts_per_token]
        inner = self.activate(_grouped(rows, self.gate_up[...], counts) + self.gate_up_bias[chosen])
        out = _grouped(inner, self.down[...], counts) + here_once(self.down_bias[...])[chosen]
        out = out[jnp.argsort(order)].reshape(*weights.shape, -1)
        mixed = summed(jnp.sum(out.astype(jnp.float32) * weights[..., None], axis=1))
        return mixed.astype(x.dtype).reshape(x.shape)

    def route(self, x: Float[Array, "N E"]) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
        """The chosen experts of each token and their float32 weights, which sum to one."""
        logits = linear(x, self.router[...], self.router_bias[...], dtype=jnp.float32)
        top, experts = jax.lax.top_k(logits, self.config.experts_per_token)
        return experts, jax.nn.softmax(top, axis=-1)

    def activate(self, gate_up: Float[Array, "N F2"]) -> Float[Array, "N F"]:
        """SwiGLU with both halves clipped and one added to the linear half."""
        limit, alpha = self.config.swiglu_limit, self.config.swiglu_alpha
        gate = jnp.minimum(gate_up[:, ::2], limit)
        up = jnp.clip(gate_up[:, 1::2], -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(gate * alpha)


def _grouped(
    x: Float[Array, "N K"], weight: Float[Array, "X K M"], counts: Int[Array, " X"]
) -> Float[Array, "N M"]:
    return jax.lax.ragged_dot(x, weight, counts, precision=precision(x.dtype))
