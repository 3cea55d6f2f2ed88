"""R-KV as its authors keep a cache: contiguous, what survives being gathered to its front.

The peer of ``bench_decode``: no pages and no codes; the cache grows from the budget until it is cut
to it again. Attention is JAX's own, by cuDNN on a GPU.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.compress.context import Context
from kvjax.compress.selectors import RKV
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder


class Layer(NamedTuple):
    """One layer's cache.

    Attributes:
        k: keys with their rotary position, in the order in which they were kept.
        v: values.
        pos: logical position of each.
        queries: the last ones.
    """

    k: Float[Array, "B S Hkv D"]
    v: Float[Array, "B S Hkv D"]
    pos: Int[Array, "B S Hkv"]
    queries: Float[Array, "B N Hq D"]


class Gathered(NamedTuple):
    """Rows of one length.

    Attributes:
        layers: one `Layer` each.
        held: tokens in every head.
        length: tokens that were read.
        token: int32 [B], what is read next.
    """

    layers: tuple[Layer, ...]
    held: Int[Array, ""]
    length: Int[Array, ""]
    token: Int[Array, " B"]


def empty(config: ModelConfig, rows: int, slots: int, selector: RKV, dtype: DTypeLike) -> Gathered:
    """A cache of ``slots`` for each head: the budget and what comes between two cuts."""

    def layer() -> Layer:
        keys = (rows, slots, config.num_kv_heads, config.head_dim)
        queries = (rows, selector.window, config.num_heads, config.head_dim)
        k, v = jnp.zeros(keys, dtype), jnp.zeros(keys, dtype)
        return Layer(k, v, jnp.zeros(keys[:3], jnp.int32), jnp.zeros(queries, dtype))

    layers = tuple(layer() for _ in range(config.num_layers))
    zero, tokens = (jnp.zeros(shape, jnp.int32) for shape in ((), rows))
    return Gathered(layers, zero, zero + 0, tokens)


@functools.partial(jax.jit, static_argnames="steps", donate_argnames="state")
def decode(model: Decoder, state: Gathered, *, steps: int) -> tuple[Gathered, Int[Array, "N B"]]:
    """Greedy steps, and the tokens that were chosen."""

    def step(state: Gathered, _):
        positions = jnp.broadcast_to(state.length, (len(state.token), 1))
        attend = functools.partial(_attend, model.config.scale, state)
        hidden, layers = model(state.token[:, None], positions, attend, state.layers)
        token = model.logits(hidden)[:, 0].argmax(-1).astype(jnp.int32)
        return Gathered(layers, state.held + 1, state.length + 1, token), token

    return jax.lax.scan(step, state, None, length=steps)


def _attend(scale: float, state: Gathered, index: int, layer: Layer, q, k, v, sinks):
    """One token's attention to what is held and itself."""
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=state.held, axis=1)
    pos = jnp.broadcast_to(state.length, k.shape[:3])
    queries = jnp.concatenate([layer.queries[:, 1:], q.astype(layer.queries.dtype)], 1)
    layer = Layer(put(layer.k, k), put(layer.v, v), put(layer.pos, pos), queries)
    live = jnp.broadcast_to(state.held + 1, q.shape[:1])
    on_gpu = jax.default_backend() == "gpu"
    out = jax.nn.dot_product_attention(
        q,
        layer.k,
        layer.v,
        scale=scale,
        key_value_seq_lengths=live,
        implementation="cudnn" if on_gpu else "xla",
    )
    return out, layer


@functools.partial(
    jax.jit, static_argnames=("scale", "selector", "budget"), donate_argnames="state"
)
def cut(state: Gathered, *, scale: float, selector: RKV, budget: int) -> Gathered:
    """Gather the ``budget`` tokens of each head that score highest to the front, in order."""

    def of(layer: Layer) -> Layer:
        k, pos = layer.k.swapaxes(1, 2), layer.pos.swapaxes(1, 2)
        rows, _, slots, _ = k.shape
        live = jnp.arange(slots, dtype=jnp.int32) < state.held
        window = layer.queries.shape[1]
        last = state.length - window + jnp.arange(window, dtype=jnp.int32)
        context = Context(
            bias=jnp.broadcast_to(jnp.where(live, 0.0, -jnp.inf)[None, None], pos.shape),
            pos=pos,
            length=jnp.broadcast_to(state.length, (rows,)),
            prompt=jnp.zeros(rows, jnp.int32),
            seed=jnp.int32(0),
            k=k,
            queries=layer.queries,
            query_pos=jnp.broadcast_to(last[None], (rows, window)),
            scale=scale,
        )
        scores = jnp.where(live[None, None], selector(context), -jnp.inf)
        kept = jnp.sort(jax.lax.top_k(scores, budget)[1], axis=-1).swapaxes(1, 2)

        def gather(x):
            index = kept.reshape(*kept.shape, *(1,) * (x.ndim - kept.ndim))
            return x.at[:, :budget].set(jnp.take_along_axis(x, index, axis=1))

        return layer._replace(k=gather(layer.k), v=gather(layer.v), pos=gather(layer.pos))

    layers = tuple(map(of, state.layers))
    return state._replace(layers=layers, held=jnp.full_like(state.held, budget))
