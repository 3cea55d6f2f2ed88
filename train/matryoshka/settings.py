"""How MatryoshkaKV is trained, and how ranks are shared out."""

import dataclasses
from typing import Literal

from kvjax.errors import UsageError
from kvjax.train.dynakv.settings import TrainSettings
from kvjax.train.matryoshka.projections import LEVELS


@dataclasses.dataclass(frozen=True)
class MatryoshkaSettings:
    """All that decides a training beside the model and the data.

    Attributes:
        target_rates: shares of components kept, for each of which ranks are found.
        training: steps, rows and the optimiser; ``lr_u`` is the learning rate of projections and
            means. Of the rest, what belongs to DynaKV's gates and rates has no effect.
        kl_weight: of the divergence from the model as it is, in the loss.
        ce_weight: of the cross-entropy.
        ranks: "greedy" shares them out (see `search`), "uniform" gives all heads one.
        drops: ranks that one sweep of the search lowers. 1 is the paper's; its code lowers 1,536 of
            2,048 at once.
        search_rows: rows of the training data that the search reads.

    Raises:
        UsageError: a value that cannot be; begins with its name.
    """

    target_rates: tuple[float, ...]
    training: TrainSettings = dataclasses.field(default_factory=lambda: TrainSettings(lr_u=1e-3))
    kl_weight: float = 0.25
    ce_weight: float = 0.75
    ranks: Literal["greedy", "uniform"] = "greedy"
    drops: int = 1
    search_rows: int = 4

    def __post_init__(self):
        for rate in self.target_rates:
            if not 1 / LEVELS <= rate <= 1:
                raise UsageError(f"target_rate must be from 1/{LEVELS} to 1, got {rate}")
        if not self.target_rates:
            raise UsageError("target_rate must be given at least once")
        for name in ("kl_weight", "ce_weight"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise UsageError(f"{name} must be at least 0 and finite, got {value}")
        if self.kl_weight + self.ce_weight == 0:
            raise UsageError("kl_weight and ce_weight must not both be 0")
        for name in ("drops", "search_rows"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.ranks not in ("greedy", "uniform"):
            raise UsageError(f"ranks must be greedy or uniform, got {self.ranks!r}")
