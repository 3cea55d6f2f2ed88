"""Write tiny random models with the logits and greedy tokens that transformers computes for them.

Run in an environment of its own with ``torch`` and ``transformers`` (nothing else here needs them):

    python tests/golden/make_models.py

Each folder gets ``config.json``, ``model.safetensors`` and ``golden.npz`` with ``prompt`` [T],
``logits`` float32 [T, V] of the whole prompt, and ``greedy`` [64]. The models are small, but their
weights are wide: norms, biases and sinks are random as well, so that forgetting any one of them
shows. A seed is only used if no greedy choice and no routing is close to a tie.
"""

import json
import pathlib

import numpy as np
import torch
from mxfp4 import quantize_experts
from safetensors.torch import save_file
from specs import SPECS
from transformers import AutoConfig, AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
PROMPT_TOKENS = 48
NEW_TOKENS = 64
MIN_MARGIN = 5e-3
MIN_DISTINCT = 16


def main() -> None:
    torch.set_grad_enabled(False)
    for name, spec in SPECS.items():
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(spec, indent=2) + "\n")
        seed = next(seed for seed in range(1000) if write_model(folder, spec, seed))
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{name}: seed {seed}, {size / 1e3:.0f} kB")
    write_sharded(HERE / "llama", HERE / "llama_sharded")


def write_model(folder: pathlib.Path, spec: dict, seed: int) -> bool:
    """Write weights and golden values, or give False where a choice is too close to a tie."""
    generator = torch.Generator().manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    quantised = getattr(config, "quantization_config", None) is not None
    if quantised:
        del config.quantization_config  # the reference computes with the dequantised values
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    for name, parameter in model.named_parameters():
        randomise(name, parameter, generator)
        if quantised:
            parameter.copy_(parameter.bfloat16().float())
    tensors = {name: parameter.clone() for name, parameter in model.named_parameters()}
    expected = {}
    if quantised:
        tensors, expected = quantize_experts({k: v.bfloat16() for k, v in tensors.items()})
        for name, value in expected.items():
            model.get_parameter(name).copy_(value)
    prompt = torch.randint(0, spec["vocab_size"], (PROMPT_TOKENS,), generator=generator)
    logits, greedy, margin = decode(model, prompt)
    if margin < MIN_MARGIN or len(set(greedy.tolist())) < MIN_DISTINCT:
        return False
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    np.savez_compressed(
        folder / "golden.npz",
        prompt=prompt.numpy().astype(np.int32),
        logits=logits.numpy(),
        greedy=greedy.numpy().astype(np.int32),
        **{name: value.numpy() for name, value in expected.items()},
    )
    return True


def randomise(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    if "norm" in name:
        parameter.uniform_(0.5, 1.5, generator=generator)
    elif name.endswith("bias"):
        parameter.normal_(0, 0.5, generator=generator)
    elif "sinks" in name or "embed" in name:
        parameter.normal_(0, 1, generator=generator)
    else:
        # The experts' weights are [X, in, out], all others [out, in].
        inputs = parameter.shape[1]
        parameter.normal_(0, 2 * inputs**-0.5, generator=generator)


def decode(model, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Logits of the prompt, greedy tokens without any cache, and the closest call on the way."""
    margins = []

    def watch_router(module, inputs, outputs):
        ranked = outputs[0].sort(dim=-1, descending=True).values
        margins.append((ranked[:, module.top_k - 1] - ranked[:, module.top_k]).min().item())

    for name, module in model.named_modules():
        if name.endswith("mlp.router"):
            module.register_forward_hook(watch_router)
    ids = prompt
    for _ in range(NEW_TOKENS):
        logits = model(ids[None], use_cache=False).logits[0]
        best = logits[-1].topk(2)
        margins.append((best.values[0] - best.values[1]).item())
        ids = torch.cat([ids, best.indices[:1]])
    return logits[: len(prompt)], ids[len(prompt) :], min(margins)


def write_sharded(source: pathlib.Path, folder: pathlib.Path) -> None:
    """The same weights in two files with an index; the golden values are those of ``source``."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tensors = {name: parameter.clone() for name, parameter in model.named_parameters()}
    names = sorted(tensors)
    files = {}
    for part, chosen in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{part:05d}-of-00002.safetensors"
        save_file(
            {name: tensors[name] for name in chosen}, folder / file, metadata={"format": "pt"}
        )
        files |= dict.fromkeys(chosen, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


if __name__ == "__main__":
    main()
