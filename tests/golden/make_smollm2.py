"""Write what transformers computes for SmolLM2-135M-Instruct: token ids, and logits of a prompt.

Run in an environment of its own with ``torch``, ``transformers``, ``gguf`` and ``accelerate``:

    python tests/golden/make_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf

``smollm2.json`` gets ``texts`` and their ``ids``, ``messages`` and their ``chat_ids`` under the
model's chat template, and ``prompt`` with its ``prompt_ids``; ``smollm2.npz`` gets ``logits``
float32 [4, V] at the prompt's last four positions, and 32 ``greedy`` tokens that follow it.
"""

import json
import pathlib
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

HERE = pathlib.Path(__file__).parent
MIN_MARGIN = 0.02
TEXTS = [
    "Hello, world!",
    " a leading space",
    "   three leading spaces",
    "trailing space ",
    "0123456789",
    "3.14159 + 2,718.28 = 2721.42159",
    "1st 22nd 333rd 4444th",
    "def f(x: int) -> int:\n    return x**2  # square\n",
    '{"key": [1, null, "\\u00e9"]}',
    "tabs\tand\r\nline ends\n\n\n",
    "😀👩‍👩‍👧‍👦🏳️‍🌈",
    "naïve café Ångström",
    "Привет, мир",
    "你好，世界。日本語テキスト",  # noqa: RUF001
    "مرحبا بالعالم שלום עולם",
    "हिन्दी ไทย 한국어 mixed with English",
    "<|im_start|>user\nHi<|im_end|>\n",
    "text<|endoftext|>more",
    "don't I'LL we've THEY'RE",
    "",
]
MESSAGES = [
    [{"role": "user", "content": "Tell me a story about a lighthouse."}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "What colour is the sky?"},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "And grass?"},
    ],
]
PROMPT = (
    "The lighthouse keeper climbed the 199 steps every evening, whether the sea was calm or not. "
    "He lit the lamp, wrote the hour in his book, and sat down by the window to wait. On the last "
    "night of October the wind turned, and far out in the dark he saw"
)


def main(path: pathlib.Path) -> None:
    torch.set_grad_enabled(False)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
    prompt_ids = tokenizer(PROMPT)["input_ids"]
    logits, greedy = decode(model, torch.tensor(prompt_ids))
    chat = [
        tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=True)["input_ids"]
        for m in MESSAGES
    ]
    record = {
        "texts": TEXTS,
        "ids": [tokenizer(text)["input_ids"] for text in TEXTS],
        "messages": MESSAGES,
        "chat_ids": chat,
        "prompt": PROMPT,
        "prompt_ids": prompt_ids,
    }
    (HERE / "smollm2.json").write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n")
    np.savez_compressed(HERE / "smollm2.npz", logits=logits, greedy=greedy.astype(np.int32))


def decode(model, prompt: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Logits at the last four positions, and greedy tokens that are not close to a tie."""
    ids, last = prompt, None
    for _ in range(32):
        logits = model(ids[None], use_cache=False).logits[0]
        last = logits[-4:].numpy() if last is None else last
        best = logits[-1].topk(2)
        margin = (best.values[0] - best.values[1]).item()
        assert margin > MIN_MARGIN, f"a margin of {margin} is too close to a tie: change the prompt"
        ids = torch.cat([ids, best.indices[:1]])
    return last, ids[len(prompt) :].numpy()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
