"""The loss: cross-entropy and the squared rate (equation 9)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.dynakv.forward import Mode, Rates, compressed_states, plain_states
from kvjax.dynakv.spectrum import Basis, Spectra
from kvjax.models.decoder import Decoder
from kvjax.models.layers import logits_of, precision

_CHUNK = 256  # tokens of a row whose logits are there at once


class Trained(nnx.Module):
    """A model with what stands beside it, so that either can be trained."""

    def __init__(self, model: Decoder, spectra: Spectra):
        self.model = model
        self.spectra = spectra


class Sums(NamedTuple):
    """Sums over the tokens of some rows, from which means over any number of rows are made.

    Padding takes no part.

    Attributes:
        nats: f32[], of the cross-entropy of every token but a row's first.
        predicted: f32[], the tokens that are summed there.
        soft: f32[L, 2], of each layer's soft rates of keys and values.
        hard: f32[L, 2], the same of hard rates.
        hard_first: f32[L, 2], the part of it that is due to the rows' first tokens.
        tokens: f32[], tokens of the rates.
        first: f32[], the rows' first tokens among them.
    """

    nats: Float[Array, ""]
    predicted: Float[Array, ""]
    soft: Float[Array, "L 2"]
    hard: Float[Array, "L 2"]
    hard_first: Float[Array, "L 2"]
    tokens: Float[Array, ""]
    first: Float[Array, ""]

    def loss(self, alpha: Float[Array, ""]) -> Float[Array, ""]:
        """Equation 9: the rate is averaged over everything before it is squared."""
        return self.cross_entropy() + alpha * jnp.square(self.soft_rate())

    def cross_entropy(self) -> Float[Array, ""]:
        return self.nats / self.predicted

    def soft_rate(self) -> Float[Array, ""]:
        return self.soft.mean() / self.tokens

    def hard_rate(self) -> Float[Array, ""]:
        return self.hard.mean() / self.tokens


def compressed_sums(
    trained: Trained,
    bases: tuple[tuple[Basis, Basis], ...],
    tokens: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    *,
    mode: Mode,
    remat: bool,
    sharp: Float[Array, ""] | None = None,
) -> Sums:
    """The sums of some rows under compression; ``valid`` is false where a row is padded."""
    model, how = trained.model, {"mode": mode, "sharp": sharp, "remat": remat}
    hidden, rates = compressed_states(model, trained.spectra, bases, tokens, **how)
    return _sums(*cross_entropy(model, hidden, tokens, valid), rates, valid)


def plain_cross_entropy(
    model: Decoder, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Nats and predicted tokens of the model as it is."""
    return cross_entropy(model, plain_states(model, tokens), tokens, valid)


def accumulated(
    trained: Trained,
    tokens: Int[Array, "A B T"],
    valid: Bool[Array, "A B T"],
    sharp: Float[Array, ""] | None = None,
    *,
    remat: bool,
) -> Sums:
    """The sums over several batches.

    Its gradient is that of one large batch, though only one is in memory at a time: the backward
    pass reads each batch again, when the means that the loss squares are known.
    """
    bases = trained.spectra.bases()

    def sums(tokens, valid):
        how = {"mode": "soft", "sharp": sharp, "remat": remat}
        return compressed_sums(trained, bases, tokens, valid, **how)

    if len(tokens) == 1:
        return sums(tokens[0], valid[0])

    def body(total, batch):
        return jax.tree.map(jnp.add, total, jax.checkpoint(sums)(*batch)), None

    shapes = jax.eval_shape(sums, tokens[0], valid[0])
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(body, zeros, (tokens, valid))[0]


def cross_entropy(
    model: Decoder,
    hidden: Float[Array, "B T E"],
    tokens: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Nats of every valid token but a row's first, and their number."""
    head = model.head

    def nats(hidden, target, counts):
        return _nats(hidden, head, target, counts)

    total = in_chunks(nats, hidden[:, :-1], tokens[:, 1:], valid[:, 1:])
    return total, valid[:, 1:].sum(dtype=jnp.float32)


@jax.custom_vjp
def _nats(
    hidden: Float[Array, "B T E"],
    head: Float[Array, "V E"],
    target: Int[Array, "B T"],
    counts: Bool[Array, "B T"],
) -> Float[Array, ""]:
    """The cross-entropy of the tokens that count.

    Its gradient by hidden states is made with it, while the logits are there, by products in the
    type of the weights; that by the head, which a frozen model does not need, makes them again.
    """
    return _nats_and_slope(hidden, head, target, counts)[0]


def _nats_and_slope(hidden, head, target, counts) -> tuple[Float[Array, ""], Float[Array, "B T V"]]:
    scores = logits_of(hidden, head, len(head))
    total = jax.nn.logsumexp(scores, axis=-1)
    chosen = jnp.arange(len(head), dtype=target.dtype)[None, None] == target[..., None]
    own = jnp.take_along_axis(scores, target[..., None], -1)[..., 0]
    slope = jnp.exp(scores - total[..., None]) - chosen.astype(scores.dtype)
    slope = slope * counts[..., None].astype(scores.dtype)
    return jnp.where(counts, total - own, 0.0).sum(), slope.astype(hidden.dtype)


def _nats_forward(hidden, head, target, counts):
    nats, slope = _nats_and_slope(hidden, head, target, counts)
    towards = jnp.einsum("btv,ve->bte", slope, head, precision=precision(head.dtype))
    return nats, (towards, hidden, head, target, counts)


def _nats_backward(kept, gradient):
    towards, *given = kept
    _, slope = _nats_and_slope(*given)
    hidden, head, *_ = given
    by_head = jnp.einsum("btv,bte->ve", slope, hidden, precision=precision(head.dtype))
    scaled = (gradient * leaf.astype(jnp.float32) for leaf in (towards, by_head))
    by_hidden, by_head = (leaf.astype(head.dtype) for leaf in scaled)
    return by_hidden, by_head, None, None


_nats.defvjp(_nats_forward, _nats_backward)


def in_chunks(
    each: Callable[..., Float[Array, "*S"]], *arrays: Shaped[Array, "B T ..."]
) -> Float[Array, "*S"]:
    """The sum of what ``each`` makes of a few tokens of every row at a time.

    Rows are filled up with zeros.
    """
    length = arrays[0].shape[1]
    chunk = min(_CHUNK, length)

    def chunks(x):
        padded = jnp.pad(x, [(0, 0), (0, -length % chunk)] + [(0, 0)] * (x.ndim - 2))
        split = padded.reshape(x.shape[0], -1, chunk, *x.shape[2:])
        return jnp.moveaxis(split, 1, 0)

    parts = tuple(map(chunks, arrays))
    return jax.lax.map(lambda part: each(*part), parts).sum(0)


def _sums(
    nats: Float[Array, ""], predicted: Float[Array, ""], rates: Rates, valid: Bool[Array, "B T"]
) -> Sums:
    soft, hard = (jnp.where(valid[None, None], rate, 0.0) for rate in rates)
    return Sums(
        nats=nats,
        predicted=predicted,
        soft=soft.sum((2, 3)),
        hard=hard.sum((2, 3)),
        hard_first=hard[..., 0].sum(2),
        tokens=valid.sum(dtype=jnp.float32),
        first=valid[:, 0].sum(dtype=jnp.float32),
    )
