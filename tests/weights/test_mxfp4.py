import ml_dtypes
import numpy as np
import pytest

from kvjax.weights import mxfp4


def oracle(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """One number at a time, decoded by ml_dtypes' own 4-bit and scale types."""
    experts, out, groups, width = blocks.shape
    plain = np.zeros((experts, groups * width * 2, out), np.float32)
    for x, o, g, byte in np.ndindex(blocks.shape):
        scale = float(scales[x, o, g : g + 1].view(ml_dtypes.float8_e8m0fnu)[0])
        for half in (0, 1):
            code = np.uint8(blocks[x, o, g, byte] >> (4 * half) & 0xF)
            value = float(np.array([code]).view(ml_dtypes.float4_e2m1fn)[0])
            plain[x, g * 32 + 2 * byte + half, o] = value * scale
    return plain


def test_every_code_and_scale_as_ml_dtypes_decodes_them():
    rng = np.random.default_rng(0)
    blocks = rng.permutation(np.resize(np.arange(256, dtype=np.uint8), 2 * 3 * 5 * 16))
    blocks = blocks.reshape(2, 3, 5, 16)
    scales = rng.integers(1, 252, (2, 3, 5), np.uint8)
    scales[0, 0, :2] = 1, 251  # the ends of what float32 holds
    plain = mxfp4.dequantise_experts(blocks, scales)
    assert plain.dtype == np.float32
    np.testing.assert_array_equal(plain, oracle(blocks, scales))


def test_low_nibble_comes_first():
    blocks = np.zeros((1, 1, 1, 16), np.uint8)
    blocks[..., 0] = 0xF2  # 2 -> 1.0, 15 -> -6.0
    plain = mxfp4.dequantise_experts(blocks, np.full((1, 1, 1), 128, np.uint8))
    np.testing.assert_array_equal(plain[0, :3, 0], [2.0, -12.0, 0.0])


@pytest.mark.parametrize("scale", [254, 255])
def test_a_scale_beyond_float32_is_not_finite(scale):
    blocks = np.full((1, 1, 1, 16), 0x77, np.uint8)
    plain = mxfp4.dequantise_experts(blocks, np.full((1, 1, 1), scale, np.uint8))
    assert not np.isfinite(plain).any()
