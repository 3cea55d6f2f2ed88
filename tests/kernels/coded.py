"""Tokens to code and store, and what may be told of two backends that did so."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import SCRATCH_PAGE, KVPages
from pallas_kernels.formats import PER_BYTE, middle
from pallas_kernels.rotation import rotation

ROWS, HEADS, PAGE, PAGES = 2, 2, 16, 17
FORMATS = {
    "bf16": ("float", "float"),
    "fp8": ("fp8", "fp8"),
    "int8": ("int8", "int8"),
    "int4": ("int4", "int4"),
    "int2": ("int2", "int2"),
    "k4v2": ("int4", "int2"),
    "k16v4": ("float", "int4"),
}


def problem(name: str, dim: int, tokens: int, *, full: bool = False, dtype=jnp.float32) -> dict:
    """New tokens for distinct slots of pages full of old ones; those of the scratch page are NaN.

    Args:
        full: the class has mean and balance, and its slots note mass and levels.
    """
    rng = np.random.default_rng(dim + tokens)
    formats = FORMATS[name]

    draw = rng.standard_normal
    held = {
        "bias": rng.choice([0, -np.inf, 1.5], (PAGES, PAGE)).astype(np.float32),
        "pos": rng.integers(0, 99, (PAGES, PAGE), np.int32),
    }
    held["bias"][SCRATCH_PAGE], held["pos"][SCRATCH_PAGE] = -np.inf, -1
    for side, fmt in zip("kv", formats, strict=True):
        shape = PAGES, PAGE, dim // PER_BYTE.get(fmt, 1)
        codes, scale = draw(shape).astype(dtype), None
        if fmt != "float":
            codes = rng.integers(0, 256, shape, np.uint8)
            scale = rng.uniform(0.1, 1, (PAGES, PAGE, 1)).astype(np.float16)
        held |= {side: codes, f"{side}_scale": scale}
    coded = formats != ("float", "float")
    if full and coded:
        held["mean"] = 5 * draw((HEADS, dim)).astype(np.float32)
        held["balance"] = np.exp(draw((HEADS, dim))).astype(np.float32)
    if full:
        held["mass"] = rng.uniform(0, 1, (PAGES, PAGE)).astype(np.float32)
        held["level"] = rng.integers(0, 9, (PAGES, PAGE), np.uint8)
    held = {name: x for name, x in held.items() if x is not None}
    turned = {name: held[name].swapaxes(1, 2) for name in ("v", "v_scale") if name in held}
    pool = KVPages(
        **{name: jnp.asarray(x) for name, x in (held | turned).items()},
        k_format=formats[0],
        v_format=formats[1],
        rotated=coded,
    )
    places = rng.permutation(np.arange(PAGE, PAGES * PAGE))[: ROWS * HEADS * tokens]
    pages = (places // PAGE).reshape(ROWS, HEADS, tokens)
    pages[0, 1, 0] = pages[1, 0, tokens // 2] = SCRATCH_PAGE
    shape = ROWS, HEADS, tokens
    k, v = (draw((*shape, dim)) * np.exp(draw((*shape, 1))) for _ in "kv")
    k[..., 3] += 9.0
    k[1, 1, 0], v[1, 1, 0] = 0.0, 1e-9  # a token of zeros, and one too small for float16
    k[pages == SCRATCH_PAGE] = v[pages == SCRATCH_PAGE] = np.nan
    return {
        "pool": pool,
        "pages": jnp.asarray(pages, jnp.int32),
        "slots": jnp.asarray(places % PAGE, jnp.int32).reshape(pages.shape),
        "k": jnp.asarray(k, dtype),
        "v": jnp.asarray(v, dtype),
        "pos": jnp.asarray(rng.integers(100, 10**6, (ROWS, tokens)), jnp.int32),
        "mass": jnp.asarray(rng.uniform(1, 2, pages.shape), jnp.float32) if full else None,
    }


def arrays(pool: KVPages) -> dict[str, np.ndarray]:
    """What slots hold, by name, with pages and slots in front."""
    last = {"v", "v_scale"}  # where slots come last
    names = ("k", "v", "bias", "pos", "k_scale", "v_scale", "mass", "level")
    found = {name: getattr(pool, name) for name in names if getattr(pool, name) is not None}
    numpy = {name: np.asarray(x) for name, x in found.items()}
    return {name: x.swapaxes(1, 2) if name in last else x for name, x in numpy.items()}


def _numbers(packed: np.ndarray, fmt: str) -> np.ndarray:
    """What codes say before they are scaled."""
    if fmt == "fp8":
        return packed.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    bits = 8 // PER_BYTE[fmt]
    planes = [packed >> bits * i & 2**bits - 1 for i in range(PER_BYTE[fmt])]
    return np.concatenate(planes, -1) - middle(fmt)


def _exact(arguments: dict, side: str) -> np.ndarray:
    """What is coded of the tokens, in float64."""
    pool, x = arguments["pool"], np.asarray(arguments[side], np.float64)
    for name, into in (("mean", np.subtract), ("balance", np.divide)):
        if side == "k" and getattr(pool, name) is not None:
            x = into(x, np.asarray(getattr(pool, name), np.float64)[None, :, None])
    return x @ rotation(x.shape[-1]).astype(np.float64)


def check(stored: KVPages, expected: KVPages, arguments: dict, *, scratch: bool = False) -> None:
    """Compare what two backends made of the same tokens.

    Their codes and scales may differ where two choices are as good, by the last bits of what is
    coded: so each token's error beside exact numbers has to be the same.

    Args:
        scratch: whether the scratch page may have been written to.
    """
    pool, pages, slots = (arguments[name] for name in ("pool", "pages", "slots"))
    at = np.asarray(pages), np.asarray(slots)
    new = np.zeros(pool.bias.shape, bool)
    new[at] = True
    new[SCRATCH_PAGE] = False
    old = ~new
    if scratch:
        old[SCRATCH_PAGE] = False
    got, want, before = arrays(stored), arrays(expected), arrays(pool)
    assert got.keys() == want.keys() == before.keys()
    for name, array in got.items():
        assert array[old].tobytes() == before[name][old].tobytes(), f"{name} of other slots"
    for name in ("bias", "pos", "mass", "level"):
        if name in got:
            np.testing.assert_array_equal(got[name][new], want[name][new])
    real = at[0] != SCRATCH_PAGE
    for side, fmt in (("k", pool.k_format), ("v", pool.v_format)):
        mine, theirs = (found[side][new].astype(np.float32) for found in (got, want))
        if fmt == "float":
            exact = not pool.rotated
            np.testing.assert_allclose(
                mine, theirs, rtol=0 if exact else 1e-2, atol=0 if exact else 1e-5
            )
            continue
        errors = []
        for found in (got, want):
            scale = found[f"{side}_scale"][at].astype(np.float64)
            apart = _numbers(found[side][at], fmt) * scale - _exact(arguments, side)
            errors.append((apart**2).sum(-1)[real])
        np.testing.assert_allclose(*errors, rtol=2e-3, atol=1e-12)
