"""Write GPT-OSS expert weights as the released checkpoints do: 4-bit floats in blocks of 32.

Each block of 32 values along the contracted axis shares a power of two (uint8, biased by 127); a
value is one of sixteen 4-bit codes, two to a byte, the first in the low half.
"""

import torch
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_LARGEST_EXPONENT = 2  # of the 4-bit format, whose largest value is 6 = 1.5 * 2**2


def quantize_experts(tensors: dict) -> tuple[dict, dict]:
    """Replace the experts' weights by blocks and scales.

    Returns:
        The tensors to save, and by name the float32 values that transformers reads back.
    """
    saved, expected = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith(_EXPERTS):
            saved[name] = tensor
            continue
        blocks, scales = encode(tensor.float())
        saved[f"{name}_blocks"], saved[f"{name}_scales"] = blocks, scales
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return saved, expected


def encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[X, in, out] -> blocks uint8 [X, out, in / 32, 16] and scales uint8 [X, out, in / 32]."""
    values = weight.transpose(1, 2).unflatten(2, (-1, 32))
    largest = values.abs().amax(-1).clamp(min=2.0**-100)
    exponents = largest.log2().floor() - _LARGEST_EXPONENT
    scaled = values / torch.exp2(exponents)[..., None]
    codes = (scaled[..., None] - torch.tensor(FP4_VALUES)).abs().argmin(-1).to(torch.uint8)
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return blocks.contiguous(), (exponents + 127).to(torch.uint8).contiguous()
