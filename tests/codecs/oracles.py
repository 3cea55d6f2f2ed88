"""Codecs in plain NumPy, one block of numbers at a time, from their definitions."""

import ml_dtypes
import numpy as np

FACTORS = {
    "int8": (1, 0.995, 0.99, 0.985),
    "int4": (1, 0.97, 0.94, 0.91, 0.88, 0.84, 0.8, 0.72),
    "int2": (1, 0.8, 0.7, 0.63, 0.56, 0.5, 0.42, 0.33),
}
LEVELS = {
    "int8": np.arange(-127, 128.0),
    "int4": np.arange(-7, 8.0),
    "int2": np.array([-1.5, -0.5, 0.5, 1.5]),
}
LOWEST_CODE = {"int8": 1, "int4": 1, "int2": 0}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = ml_dtypes.float8_e4m3fn


def level(code: int, fmt: str) -> float:
    """What one code says."""
    if fmt == "fp8":
        return float(np.uint8(code).view(E4M3))
    if fmt == "e2m1":
        return float(FP4[code % 8] * (-1 if code >= 8 else 1))
    return code - {"int8": 128, "int4": 8, "int2": 1.5, "ternary": 1}.get(fmt, 0)


def reciprocal(scale) -> np.float32:
    return np.float32(1) / np.float32(scale) if scale > 0 else np.float32(0)


def candidates(x: np.ndarray, fmt: str) -> list[np.float16]:
    """The scales that one block may get, as they are stored."""
    top = LEVELS[fmt][-1]
    tries = [abs(x).max() * np.float32(factor / top) for factor in FACTORS[fmt]]
    return [np.float16(min(scale, 65504)) for scale in tries]


def int_codes(x: np.ndarray, scale: np.float16, fmt: str) -> np.ndarray:
    """The code of the level nearest to every number of a block (halfway, the even or upper one)."""
    codes = []
    for steps in x * reciprocal(scale):
        distance = abs(LEVELS[fmt] - steps)
        nearest = np.flatnonzero(distance == distance.min()).tolist()
        if len(nearest) == 2 and fmt != "int2":
            nearest = [i for i in nearest if LEVELS[fmt][i] % 2 == 0]
        codes.append(nearest[-1] + LOWEST_CODE[fmt])
    return np.array(codes, np.uint8)


def squared_error(x: np.ndarray, scale: np.float16, fmt: str) -> float:
    levels = LEVELS[fmt][int_codes(x, scale, fmt) - LOWEST_CODE[fmt]]
    return float(((levels * float(scale) - x) ** 2).sum())


def fp8(x: np.ndarray) -> tuple[np.ndarray, np.float16]:
    scale = np.float16(abs(x).max() * np.float32(1 / 448))
    steps = [
        min(max(number, np.float32(-448)), np.float32(448)) for number in x * reciprocal(scale)
    ]
    return np.array(steps, np.float32).astype(E4M3).view(np.uint8), scale


def e2m1(x: np.ndarray) -> tuple[np.ndarray, np.generic]:
    scale = (abs(x).max() * np.float32(1 / 6)).astype(E4M3)
    codes = []
    for number in x:
        distance = abs(FP4 - abs(number) * reciprocal(scale))
        nearest = np.flatnonzero(distance == distance.min())
        even = [code for code in nearest if code % 2 == 0]
        codes.append((even[0] if len(nearest) > 1 else nearest[0]) + (8 if number < 0 else 0))
    return np.array(codes, np.uint8), scale


def ternary(x: np.ndarray, rule: str) -> tuple[np.ndarray, np.generic]:
    sizes = [abs(float(number)) for number in x]
    if rule == "twn":
        threshold = 0.7 * sum(sizes) / len(sizes)
        kept = [size for size in sizes if size > threshold]
        scale = E4M3(sum(kept) / len(kept) if kept else 0)
    else:
        scale = E4M3(max(sizes))
        threshold = 0.5 * float(scale)
    signs = [0 if size <= threshold else (-1 if number < 0 else 1)
             for size, number in zip(sizes, x, strict=True)]  # fmt: skip
    return np.array(signs, np.int8).astype(np.uint8) + 1, scale


def asymmetric(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.float16, np.float16]:
    top = 2**bits - 1
    zero = np.float16(x.min())
    scale = np.float16((x.max() - x.min()) * np.float32(1 / top))
    steps = (x - np.float32(zero)) * reciprocal(scale)
    codes = [min(max(round(float(step)), 0), top) for step in steps]
    return np.array(codes, np.uint8), scale, zero
