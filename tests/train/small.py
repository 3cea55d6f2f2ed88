"""A training of a tiny model that takes seconds, most of them for compiling."""

import numpy as np

from kvjax.dynakv.settings import SpectralSettings
from kvjax.train.dynakv.data import Rows
from kvjax.train.dynakv.settings import TrainSettings
from tests.dynakv.tiny import tiny, tokens

SETTINGS = TrainSettings(
    steps=6,
    seq_len=12,
    batch_size=4,
    grad_accum=1,
    warmup=1,
    lr_gate=0.02,
    lr_bias=0.3,
    eval_every=2,
    save_every=3,
    eval_rows=4,
    remat=False,
)
LOOSE = SpectralSettings(tilt=4.0)


def rows(count: int = 20) -> Rows:
    ids = tokens(tiny(), (count, SETTINGS.seq_len))
    return Rows(ids, np.ones(ids.shape, bool))
