"""The basis that keys and values are stored in, and queries and outputs that go with it.

Keys are stored as ``rotate((k - mean) / balance)`` and values as ``rotate(v)``, so that few bits
serve them. Attention never goes back: with ``q' = rotate(q * balance)``,

    q . k  =  q' . k'  +  q . mean

and the weighted sum of rotated values is rotated back once. Weights of the model stay untouched,
and rotary embeddings are applied already.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from kvjax.codecs.codec import KVCodec
from pallas_kernels.einsum import einsum_float32
from pallas_kernels.rotation import into_basis, rotate, unrotate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyBasis:
    """Constants of a layer, of the model and never of a prompt: rows must not feel each other.

    Attributes:
        mean: what is taken off every key of a KV head; None for nothing.
        balance: what each of its channels is divided by, positive; None for 1.
    """

    mean: Float32[Array, "Hkv D"] | None = None
    balance: Float32[Array, "Hkv D"] | None = None


def code_keys(
    codec: KVCodec, basis: KeyBasis, k: Float[Array, "B Hkv T D"]
) -> Float32[Array, "B Hkv T D"]:
    """What is encoded of the keys ``k``, rotary embedding applied."""
    return into_basis(k, basis.mean, basis.balance, codec.rotate)


def plain_keys(
    codec: KVCodec, basis: KeyBasis, k: Float[Array, "B Hkv T D"]
) -> Float32[Array, "B Hkv T D"]:
    """The keys that ``code_keys`` made ``k`` of."""
    k = unrotate(k) if codec.rotate else k.astype(jnp.float32)
    if basis.balance is not None:
        k *= basis.balance[None, :, None]
    if basis.mean is not None:
        k += basis.mean[None, :, None]
    return k


def code_values(codec: KVCodec, v: Float[Array, "*batch D"]) -> Float32[Array, "*batch D"]:
    """What is encoded of the values ``v``."""
    return rotate(v) if codec.rotate else v.astype(jnp.float32)


def plain_output(codec: KVCodec, out: Float[Array, "*batch D"]) -> Float32[Array, "*batch D"]:
    """Values, or a weighted sum of them, as the model knows them."""
    return unrotate(out) if codec.rotate else out.astype(jnp.float32)


def code_queries(
    codec: KVCodec, basis: KeyBasis, q: Float[Array, "B T Hq D"]
) -> tuple[Float32[Array, "B T Hq D"], Float32[Array, "B T Hq"] | None]:
    """Queries to meet coded keys with, and what is missing from their products.

    Query head ``h`` reads KV head ``h // (Hq // Hkv)``.

    Returns:
        The queries and ``q . mean``, to be added to every coded key's product before the softmax
        scale is applied; None where there is no mean.
    """
    q = q.astype(jnp.float32)
    batch, length, _, dim = q.shape
    offset = None
    if basis.mean is not None:
        grouped = q.reshape(batch, length, basis.mean.shape[0], -1, dim)
        offset = einsum_float32("bthgd,hd->bthg", grouped, basis.mean).reshape(q.shape[:3])
    if basis.balance is not None:
        grouped = q.reshape(batch, length, basis.balance.shape[0], -1, dim)
        q = (grouped * basis.balance[None, None, :, None]).reshape(q.shape)
    return (rotate(q) if codec.rotate else q), offset
