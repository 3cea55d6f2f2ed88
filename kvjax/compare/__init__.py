"""What compression changes: a compressed cache against none, on the same tokens."""

from kvjax.compare.feed import compare
from kvjax.compare.result import Comparison
from kvjax.compare.uncached import Reference, reference

__all__ = ["Comparison", "Reference", "compare", "reference"]
