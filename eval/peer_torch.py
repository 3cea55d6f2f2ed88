"""The other side of ``bench_cpu``: transformers and PyTorch, in a Python that need not have JAX.

    python eval/peer_torch.py MODEL.gguf THREADS

Answers each line of JSON on standard input, ``{"ids": [..], "new_tokens": n}``, with a line of its
own: the tokens, and the seconds to the first and to the last of them. The first line that it
prints, when the model is loaded, tells its versions.
"""

import json
import pathlib
import platform
import sys
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, GgufConfig
from transformers.generation.streamers import BaseStreamer


class Stopwatch(BaseStreamer):
    """Notes when each token comes; what comes first is the prompt."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


def load(path: pathlib.Path):
    """The weights of the GGUF file in float32."""
    return AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()


def answer(model, ids: list[int], new_tokens: int) -> dict:
    """Decode greedily, whatever the model would stop at."""
    prompt = torch.tensor([ids])
    watch = Stopwatch()
    start = time.perf_counter()
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        streamer=watch,
    )
    _, first, *_, last = watch.times
    return {
        "tokens": tokens[0, len(ids) :].tolist(),
        "first_s": first - start,
        "total_s": last - start,
    }


def main() -> None:
    path, threads = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    model = load(path)
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "attention": model.config._attn_implementation,
    }
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, **json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
