"""The latest tokens."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float

from kvjax.compress.context import Context, recency


@dataclasses.dataclass(frozen=True)
class Streaming:
    """Recency: ``score = position``.

    With the first tokens protected as sinks this is the cache of StreamingLLM (Xiao et al., 2023,
    arXiv 2309.17453), whose positions stay the original ones here.
    """

    needs_queries: ClassVar[int] = 0
    needs_mass: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = False

    def __call__(self, ctx: Context) -> Float[Array, "B Hkv S"]:
        """Float32 scores; the highest stay."""
        return recency(ctx)
