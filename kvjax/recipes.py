"""Named methods: what of a token is stored, for how long, and in which numbers."""

import dataclasses

from kvjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a cache is kept.

    Attributes:
        name: what ``--method`` calls it.
        page_size: slots a page, a power of two.
    """

    name: str
    page_size: int

    def __post_init__(self):
        size = self.page_size
        if not isinstance(size, int) or size < 1 or size & (size - 1):
            raise UsageError(f"page_size must be a power of two, got {size!r}; 64 is the default")


def full(page_size: int = 64) -> Recipe:
    """Keep every token, in the model's own dtype: what every other recipe is compared with."""
    return Recipe("full", page_size)
