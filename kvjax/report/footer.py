"""The figures that are printed below the answers."""

import collections
import statistics
from collections.abc import Sequence
from typing import Any

from kvjax.report.units import rate, size


def footer(
    records: Sequence[dict[str, Any]],
    *,
    first_token_s: float | None,
    compile_s: float,
    decode_s: float,
) -> str:
    """Three lines, or one if nothing was decoded.

    Args:
        records: of every prompt.
        first_token_s: from the start of the process to the first text.
        compile_s: spent tracing and compiling, in the whole run.
        decode_s: from the first prompt's reading to the last token, ``compile_s`` left out.
    """
    decoded = [record for record in records if "usage" in record]
    if not decoded:
        return f"{len(records)} prompts, none decoded"
    times = _times(decoded[-1], first_token_s, compile_s)
    return "\n".join([_tokens(records, decoded, decode_s), times, _kv(decoded)])


def _tokens(records: Sequence[dict], decoded: Sequence[dict], decode_s: float) -> str:
    generated, think = (
        sum(record["usage"][key] for record in decoded) for key in ("generated", "think")
    )
    # The samples of a prompt share it.
    prompt = sum(record["usage"]["prompt"] for record in decoded if not record.get("sample"))
    prompts = sum(not record.get("sample") for record in records)
    split = f" ({think:,} thinking, {generated - think:,} answer)" if think else ""
    if len(records) == 1:
        timing = decoded[0]["timing"]
        return (
            f"prompt {prompt:,} tokens, {rate(prompt, timing['prefill_s'])} · generated "
            f"{generated:,} tokens{split}, {timing['decode_tok_s']:.1f} tok/s · "
            f"{decoded[0]['finish_reason']}"
        )
    reasons = collections.Counter(record["finish_reason"] for record in records)
    ends = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    return (
        f"{prompts} prompts, {prompt:,} tokens · generated {generated:,} tokens{split}, "
        f"{rate(generated, decode_s)} · {ends}"
    )


def _times(last: dict[str, Any], first_token_s: float | None, compile_s: float) -> str:
    parts = [] if first_token_s is None else [f"first token {first_token_s:.2f} s after start"]
    timing, peak = last["timing"], last["memory"]["peak_bytes"]
    parts += [f"load {timing['load_s']:.2f} s", f"compile {compile_s:.2f} s"]
    parts += [f"prefill {timing['prefill_s']:.2f} s"]
    parts += [] if peak is None else [f"peak memory {size(peak)}"]
    return " · ".join(parts)


def _kv(decoded: Sequence[dict[str, Any]]) -> str:
    blocks = [record["kv"] for record in decoded]
    live = sum(block["live_tokens"]["end"] for block in blocks)
    logical = sum(block["logical_tokens"] for block in blocks)
    held = sum(block["bytes"]["total_live"] for block in blocks)
    full = sum(block["bytes"]["full_bf16"] for block in blocks)
    evictions = sum(block["evictions"] for block in blocks)
    if "rates" in blocks[0]:
        rates = [
            statistics.fmean(block["rates"][name] for block in blocks)
            for name in ("hard", "keys", "values")
        ]
        held_rates = " · rank {:.3f} of full (keys {:.3f}, values {:.3f})".format(*rates)
    else:
        held_rates = ""
    evicted = f" · {evictions:,} evictions in all layers and heads" if evictions else ""
    return (
        f"cache {blocks[0]['method']}: live {live:,.0f} of {logical:,} tokens · {size(held)} · "
        f"{held / full:.3f} of a bare bf16 cache{held_rates}{evicted}"
    )
