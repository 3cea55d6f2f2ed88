"""What changes while training, and the update that changes it."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kvjax.dynakv.forward import Mode
from kvjax.dynakv.spectrum import Spectra, SpectralGate
from kvjax.models.decoder import Decoder
from kvjax.sharding import device_mesh
from kvjax.sharding.mesh import DATA
from kvjax.train.dynakv.loss import Sums, Trained, accumulated, compressed_sums
from kvjax.train.dynakv.optimiser import optimiser
from kvjax.train.dynakv.settings import TrainSettings


class TrainState(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        parameters: those that are trained, an `nnx.State`.
        optimiser: Optax's state.
        control: f32[2], the state of `AlphaControl`.
    """

    parameters: Any
    optimiser: Any
    control: Float[Array | np.ndarray, "2"]


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A model and its spectra, split into what is trained and what is not.

    Attributes:
        settings: how it is trained.
        graph: how the parts make a `Trained`.
        kept: what is not trained, on every device.
        mesh: the devices, over which the rows of a batch are spread.
    """

    settings: TrainSettings
    graph: Any
    kept: Any
    mesh: Mesh

    @classmethod
    def start(
        cls,
        model: Decoder,
        spectra: Spectra,
        settings: TrainSettings,
        control: np.ndarray,
        devices: list[jax.Device] | None = None,
    ) -> tuple["Trainer", TrainState]:
        """A trainer and the state before its first update."""
        devices = devices or jax.devices()
        mesh = device_mesh(dp=len(devices), devices=devices)
        everywhere = NamedSharding(mesh, PartitionSpec())
        trains = functools.partial(_is_trained, settings.trains)
        parts = nnx.split(Trained(model, spectra), trains, ...)
        graph, parameters, kept = parts
        # Copies, since updates take their buffers away, and a model may be used elsewhere.
        parameters = jax.tree.map(jnp.copy, jax.device_put(parameters, everywhere))
        state = TrainState(parameters, optimiser(settings).init(parameters), control)
        return cls(settings, graph, jax.device_put(kept, everywhere), mesh), state

    def update(
        self, state: TrainState, tokens: np.ndarray, valid: np.ndarray, sharp: bool = False
    ) -> tuple[TrainState, dict[str, Array]]:
        """One update by ``tokens`` [A, B, T], by the hard mask if ``sharp``; the state is donated.

        Returns:
            The new state, and the update's sums, loss and gradient norm.
        """
        rows = NamedSharding(self.mesh, PartitionSpec(None, DATA))
        parameters, moments, found = _update(
            self.graph,
            state.parameters,
            state.optimiser,
            self.kept,
            jax.device_put(tokens, rows),
            jax.device_put(valid, rows),
            np.float32(state.control[1]),
            np.float32(sharp),
            settings=self.settings,
        )
        return TrainState(parameters, moments, state.control), found

    def sums(self, state: TrainState, tokens: np.ndarray, valid: np.ndarray, mode: Mode) -> Sums:
        """The sums of held-out rows [B, T]."""
        put = self.spread(tokens, valid)
        return _evaluate(self.graph, state.parameters, self.kept, *put, mode=mode)

    def trained(self, state: TrainState) -> Trained:
        """The model and its spectra as they are now."""
        return nnx.merge(self.graph, state.parameters, self.kept)

    def spread(self, *arrays: np.ndarray) -> list[Array]:
        """Arrays whose rows (the first axis) are shared out among the devices."""
        rows = NamedSharding(self.mesh, PartitionSpec(DATA))
        return [jax.device_put(array, rows) for array in arrays]


def _is_trained(trains: str, path: tuple, variable: Any) -> bool:
    if path[0] == "model":
        return trains == "all"
    if trains == "gate" and path[-1] not in ("w", "b"):
        return False
    return isinstance(variable, SpectralGate)


@functools.partial(
    jax.jit,
    static_argnums=0,
    static_argnames="settings",
    donate_argnames=("parameters", "moments"),
)
def _update(
    graph: Any,
    parameters: Any,
    moments: Any,
    kept: Any,
    tokens: Int[Array, "A B T"],
    valid: Bool[Array, "A B T"],
    alpha: Float[Array, ""],
    sharp: Float[Array, ""],
    *,
    settings: TrainSettings,
) -> tuple[Any, Any, dict[str, Any]]:
    def loss(parameters):
        trained = nnx.merge(graph, parameters, kept)
        sums = accumulated(trained, tokens, valid, sharp, remat=settings.remat)
        return sums.loss(alpha), sums

    (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(parameters)
    with jax.numpy_dtype_promotion("standard"):  # Optax counts on it
        norm = optax.tree.norm(gradient)
        updates, moments = optimiser(settings).update(gradient, moments, parameters)
        parameters = optax.apply_updates(parameters, updates)
    return parameters, moments, {"sums": sums, "loss": value, "gradient_norm": norm}


@functools.partial(jax.jit, static_argnums=0, static_argnames="mode")
def _evaluate(graph, parameters, kept, tokens, valid, *, mode: Mode) -> Sums:
    trained = nnx.merge(graph, parameters, kept)
    bases = trained.spectra.bases()
    return compressed_sums(trained, bases, tokens, valid, mode=mode, remat=False)
