"""The other side of ``bench_kernels``: PyTorch's attention, in a Python that need not have JAX.

    python eval/peer_attention.py ROWS TOKENS KV_HEADS GROUP HEAD_DIM CALLS REPEATS

Prints a line of JSON: PyTorch's version, and the milliseconds of a call in every repeat, over keys
and values that lie in order as bfloat16. The group's heads are query heads that share a key-value
head, or, which is the same where every token is seen, as many positions of one head.
"""

import json
import sys

import torch
from torch.nn.functional import scaled_dot_product_attention


def measure(attend, q, calls: int, repeats: int) -> list[float]:
    """Each call needs the output of the one before."""
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            q = q + attend(q) * 1e-3
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return times[2:]


def main() -> None:
    rows, tokens, kv_heads, group, dim, calls, repeats = map(int, sys.argv[1:])
    like = {"dtype": torch.bfloat16, "device": "cuda"}
    k, v = (torch.randn(rows, kv_heads, tokens, dim, **like) for _ in range(2))
    q = torch.randn(rows, kv_heads * group, 1, dim, **like)
    ways = {
        "grouped heads": (
            lambda q: scaled_dot_product_attention(q, k, v, enable_gqa=True),
            q,
        ),
        "positions": (
            lambda q: scaled_dot_product_attention(q, k, v),
            q.reshape(rows, kv_heads, group, dim),
        ),
    }
    with torch.inference_mode():
        found = {name: measure(attend, q, calls, repeats) for name, (attend, q) in ways.items()}
    print(json.dumps({"version": torch.__version__, "ms": found}))


if __name__ == "__main__":
    main()
