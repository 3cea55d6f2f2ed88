"""The loss, and the update that lowers it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from kvjax.dynakv.forward import plain_states
from kvjax.dynakv.spectrum import turned
from kvjax.models.decoder import Decoder
from kvjax.train.dynakv.loss import in_chunks
from kvjax.train.dynakv.optimiser import schedule
from kvjax.train.dynakv.settings import TrainSettings
from kvjax.train.matryoshka.projections import LEVELS, Projections, rank_step, truncated_states
from kvjax.train.matryoshka.settings import MatryoshkaSettings


class Parameters(NamedTuple):
    """What is trained.

    The paper's first step turns a basis into a skew matrix, which has no solution where the basis
    has an eigenvalue of -1 (DynaKV's authors report NaN for Qwen3). Here training starts at no turn
    of the first basis.

    Attributes:
        turn: f32[L, 2, Hkv, D, D], see `turned`.
        mean: f32[L, 2, Hkv, D].
    """

    turn: Float[Array, "L 2 H D D"]
    mean: Float[Array, "L 2 H D"]


class State(NamedTuple):
    """What a checkpoint holds."""

    parameters: Parameters
    optimiser: Any


class Sums(NamedTuple):
    """Sums over the tokens that some rows predict.

    Attributes:
        nats: f32[2], of the divergence KL(model as it is || truncated) and the cross-entropy.
        predicted: f32[], how many.
    """

    nats: Float[Array, "2"]
    predicted: Float[Array, ""]


def begin(start: Projections, settings: TrainSettings) -> State:
    """The state before the first update."""
    parameters = Parameters(jnp.zeros_like(start.u), jnp.copy(start.mean))  # updates donate them
    return State(parameters, _optimiser(settings).init(parameters))


def projected(start: Projections, parameters: Parameters) -> Projections:
    """The projections as they are now."""
    return Projections(turned(start.u, parameters.turn), parameters.mean)


def compared(
    model: Decoder,
    hidden: Float[Array, "B T E"],
    teacher: Float[Array, "B T E"],
    tokens: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> Sums:
    """The sums of every valid token but a row's first.

    Args:
        model: the decoder.
        hidden: truncated states after the final norm.
        teacher: those of the model as it is.
        tokens: the rows.
        valid: false where a row is padded.
    """

    @jax.checkpoint  # so that logits are made again for the gradient, and not kept
    def nats(hidden, teacher, target, counts):
        found, wanted = (jax.nn.log_softmax(model.logits(x)) for x in (hidden, teacher))
        divergence = (jnp.exp(wanted) * (wanted - found)).sum(-1)
        own = -jnp.take_along_axis(found, target[..., None], -1)[..., 0]
        return jnp.where(counts[None], jnp.stack([divergence, own]), 0.0).sum((1, 2))

    total = in_chunks(nats, hidden[:, :-1], teacher[:, :-1], tokens[:, 1:], valid[:, 1:])
    return Sums(total, valid[:, 1:].sum(dtype=jnp.float32))


@functools.partial(jax.jit, static_argnames="settings", donate_argnames="state")
def update(
    model: Decoder,
    start: Projections,
    state: State,
    step: Int[Array, ""],
    tokens: Int[Array, "A B T"],
    valid: Bool[Array, "A B T"],
    *,
    settings: MatryoshkaSettings,
) -> tuple[State, dict[str, Array]]:
    """One update by several batches, for each of which every head draws its ranks.

    Args:
        model: the decoder, which stays as it is.
        start: the first projections.
        state: is donated.
        step: of which ranks are a function.
        tokens: the batches' rows.
        valid: false where a row is padded.
        settings: static.

    Returns:
        The new state; the loss, divergence and cross-entropy a token, and the gradient's norm.
    """
    training = settings.training
    key = jax.random.fold_in(jax.random.key(training.seed), step)
    shape = (len(tokens), *start.mean.shape[:-1])
    ranks = rank_step(model.config) * jax.random.randint(key, shape, 1, LEVELS + 1)
    weights = jnp.array([settings.kl_weight, settings.ce_weight], jnp.float32)
    predicted = valid[:, :, 1:].sum(dtype=jnp.float32)

    def loss(parameters, ranks, tokens, valid):
        own = projected(start, parameters)
        hidden = truncated_states(model, own, ranks, tokens, remat=training.remat)
        sums = compared(model, hidden, plain_states(model, tokens), tokens, valid)
        return (weights * sums.nats).sum() / predicted, sums.nats / predicted

    def body(total, batch):
        found = jax.value_and_grad(loss, has_aux=True)(state.parameters, *batch)
        return jax.tree.map(jnp.add, total, found), None

    nothing = (jnp.zeros(()), jnp.zeros(2)), jax.tree.map(jnp.zeros_like, state.parameters)
    ((value, nats), gradient), _ = jax.lax.scan(body, nothing, (ranks, tokens, valid))
    with jax.numpy_dtype_promotion("standard"):  # Optax counts on it
        norm = optax.tree.norm(gradient)
        change, moments = _optimiser(training).update(gradient, state.optimiser)
        parameters = optax.apply_updates(state.parameters, change)
    found = {"loss": value, "kl": nats[0], "ce": nats[1], "gradient_norm": norm}
    return State(parameters, moments), found


def _optimiser(settings: TrainSettings) -> optax.GradientTransformation:
    """As the repository's script has it: AdamW, here without decay, a warm-up and a cosine."""
    return optax.chain(
        optax.clip_by_global_norm(settings.clip), optax.adam(schedule(settings.lr_u, settings))
    )
