"""From prompts to text: reading prompts, decoding in chunks, sampling, streaming."""

from kvjax.decoding.chunk import DecodeState, decode_chunk, start_decoding
from kvjax.decoding.events import Event, Progress, Result
from kvjax.decoding.generate import generate, stream
from kvjax.decoding.maintain import maintain
from kvjax.decoding.prefill import prefill_chunk
from kvjax.decoding.sampling import Sampling

__all__ = [
    "DecodeState",
    "Event",
    "Progress",
    "Result",
    "Sampling",
    "decode_chunk",
    "generate",
    "maintain",
    "prefill_chunk",
    "start_decoding",
    "stream",
]
