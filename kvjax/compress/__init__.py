"""The parts that decide which tokens of a cache stay."""

from kvjax.compress.context import Context, Selector
from kvjax.compress.keep import keep_mask, protected

__all__ = ["Context", "Selector", "keep_mask", "protected"]
