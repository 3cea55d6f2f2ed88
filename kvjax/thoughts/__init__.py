"""Thoughts of a reasoning model: what kind a stretch of its trace is, and what stays of it."""

from kvjax.thoughts.retention import Retention
from kvjax.thoughts.segmenters import Given, Segmenter, Sparsity
from kvjax.thoughts.state import KINDS, Thoughts

__all__ = ["KINDS", "Given", "Retention", "Segmenter", "Sparsity", "Thoughts"]
