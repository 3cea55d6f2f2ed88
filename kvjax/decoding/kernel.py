"""The backend of attention that a caller asks for."""

import contextlib
from collections.abc import Iterator

from kvjax.errors import UsageError
from kvjax.recipes import Recipe
from pallas_kernels.paged_attention.api import missing_device


def check_kernel(kernel: str | None, recipe: Recipe) -> None:
    """Refuse a kernel that does not exist, cannot run here, or lacks what a recipe needs.

    Raises:
        UsageError: saying which.
    """
    if kernel not in (None, "mosaic", "triton", "xla"):
        raise UsageError(f"kernel must be None, mosaic, triton or xla, got {kernel!r}")
    if missing := missing_device(kernel):
        raise UsageError(f"kernel {kernel} {missing}: leave it out")
    lacks = "tells no slot's attention" if recipe.needs_mass else None
    lacks = "reads no latents" if recipe.projector is not None else lacks
    if kernel == "mosaic" and lacks:
        raise UsageError(f"kernel mosaic {lacks}, which this method needs: leave it out")


@contextlib.contextmanager
def kernel_in_errors(kernel: str | None) -> Iterator[None]:
    """A kernel that finds out later that it cannot do its work becomes a ``UsageError``."""
    try:
        yield
    except NotImplementedError as error:
        raise UsageError(f"kernel {kernel} cannot do this: {error}") from error
