"""MXFP4: blocks of 32 four-bit floats (E2M1) that share one power-of-two scale (E8M0)."""

import numpy as np

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], np.float32)
_SCALE_BIAS = 127


def dequantise(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The numbers that packed rows stand for.

    Args:
        blocks: uint8 [..., C/32, 16]; a byte holds two neighbouring numbers, the low nibble first.
        scales: uint8 [..., C/32], exponents of two biased by 127.

    Returns:
        float32 [..., C].
    """
    pairs = np.stack([_VALUES[blocks & 0xF], _VALUES[blocks >> 4]], axis=-1)
    numbers = pairs.reshape(*blocks.shape[:-1], blocks.shape[-1] * 2)
    with np.errstate(over="ignore", invalid="ignore"):  # the caller refuses what is not finite
        np.ldexp(numbers, scales[..., None].astype(np.int32) - _SCALE_BIAS, out=numbers)
    return numbers.reshape(*scales.shape[:-1], -1)


def dequantise_experts(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Expert weights as transformers lays them out, input dimension first.

    Args:
        blocks: uint8 [X, out, in/32, 16].
        scales: uint8 [X, out, in/32].

    Returns:
        float32 [X, in, out].
    """
    experts, out, groups = scales.shape
    plain = np.empty((experts, groups * 32, out), np.float32)
    for expert in range(experts):  # one at a time: the temporaries are several times its size
        plain[expert] = dequantise(blocks[expert], scales[expert]).T
    return plain
