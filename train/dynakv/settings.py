"""How a training runs."""

import dataclasses
from typing import Literal

from kvjax.errors import UsageError

DEFAULT_ALPHA = 1.0


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """All that decides a training beside the model, the data and what is trained.

    The paper states the loss and the number of tokens (2**27); the rest are our choices.

    Attributes:
        steps: updates.
        seq_len: tokens of a row.
        batch_size: rows read together, over all devices.
        grad_accum: such batches for each update.
        alpha: weight of the squared rate in the loss; None where a target rate is given.
        target_rate: the hard rate that the weight is steered to, None where it is given (ours).
        harden: share of the run after which tokens are read by the hard mask, as a cache stores
            them, with the soft mask's gradients (ours); 1 never does.
        trains: "spectral" trains bases and gates, "gate" the gates alone, "all" the model as well.
        lr_u: peak learning rate of bases.
        lr_gate: peak learning rate of the gates' weights W.
        lr_bias: peak learning rate of their biases, which spread over tens of logits (ours).
        lr_model: peak learning rate of the model, where it is trained.
        warmup: updates over which learning rates rise; a cosine then takes them to 0.
        clip: largest norm of a gradient.
        eval_every: updates between two evaluations.
        save_every: updates between two checkpoints, each with an evaluation.
        eval_rows: rows that are held out for evaluation.
        calibration_tokens: tokens that the first bases are fitted to.
        share_ranks: of a fixed gate: "even" gives each layer's keys and values the same rank,
            "fisher" shares out as many in all, as Palu does (see ``fisher_ranks``).
        keep: which checkpoint becomes the adapter: the "last" one or the "best".
        remat: whether layers are computed twice, to need less memory.
        seed: of the order of rows, and of self-sampled data.

    Raises:
        UsageError: a value that cannot be; begins with its name.
    """

    steps: int = 1000
    seq_len: int = 2048
    batch_size: int = 8
    grad_accum: int = 8
    alpha: float | None = DEFAULT_ALPHA
    target_rate: float | None = None
    harden: float = 1.0
    trains: Literal["spectral", "gate", "all"] = "spectral"
    lr_u: float = 3e-4
    lr_gate: float = 1e-3
    lr_bias: float = 0.03
    lr_model: float = 2e-5
    warmup: int = 100
    clip: float = 1.0
    eval_every: int = 100
    save_every: int = 100
    eval_rows: int = 16
    calibration_tokens: int = 65536
    share_ranks: Literal["even", "fisher"] = "even"
    keep: Literal["last", "best"] = "last"
    remat: bool = True
    seed: int = 0

    def __post_init__(self):
        bounds = {"steps": 0, "seq_len": 2, "warmup": 0, "seed": 0} | dict.fromkeys(
            ("batch_size", "grad_accum", "eval_every", "save_every", "eval_rows"), 1
        )
        for name, low in (bounds | {"calibration_tokens": 1}).items():
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise UsageError(f"{name} must be a whole number, at least {low}, got {value!r}")
        for name in ("lr_u", "lr_gate", "lr_bias", "lr_model", "clip"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < float("inf"):
                raise UsageError(f"{name} must be above 0 and finite, got {value!r}")
        if (self.alpha is None) == (self.target_rate is None):
            raise UsageError("alpha or target_rate must be given, and not both")
        alpha, target = self.alpha, self.target_rate
        if alpha is not None and not 0 <= alpha < float("inf"):
            raise UsageError(f"alpha must be at least 0 and finite, got {alpha!r}")
        if target is not None and not 0 < target < 1:
            raise UsageError(f"target_rate must be between 0 and 1, got {target!r}")
        if type(self.harden) not in (int, float) or not 0 <= self.harden <= 1:
            raise UsageError(f"harden must be from 0 to 1, got {self.harden!r}")
        if self.share_ranks not in ("even", "fisher"):
            raise UsageError(f"share_ranks must be even or fisher, got {self.share_ranks!r}")
        if self.trains not in ("spectral", "gate", "all"):
            raise UsageError(f"trains must be spectral, gate or all, got {self.trains!r}")

    @property
    def rows_a_step(self) -> int:
        """Rows of one update."""
        return self.batch_size * self.grad_accum
