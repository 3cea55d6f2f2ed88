"""Which tokens stay: one file a selector."""

from kvjax.compress.selectors.h2o import H2O
from kvjax.compress.selectors.highest_attention import HighestAttention
from kvjax.compress.selectors.omp import OMP
from kvjax.compress.selectors.random import Random
from kvjax.compress.selectors.rkv import RKV
from kvjax.compress.selectors.snapkv import SnapKV
from kvjax.compress.selectors.streaming import Streaming
from kvjax.compress.selectors.tam import SegmentQuotas
from kvjax.compress.selectors.tova import TOVA

__all__ = [
    "H2O",
    "OMP",
    "RKV",
    "TOVA",
    "HighestAttention",
    "Random",
    "SegmentQuotas",
    "SnapKV",
    "Streaming",
]
