"""A picture of the ranks at which a text's tokens are kept: on a terminal, and as a PNG."""

import io
import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from kvjax.files import write_atomically

SHADES = " ▁▂▃▄▅▆▇█"
WIDEST = 16  # characters of a token


def shown(ranks: Int[np.ndarray, "L 2 T"], tokens: Sequence[str], width: int) -> str:
    """A line a token: shares of its keys' and values' components, and their mean by layer.

    Args:
        ranks: of keys (0) and values (1).
        tokens: their texts.
        width: the components that there are.
    """
    shares = ranks / width
    labels = [_label(token) for token in tokens]
    column = max(map(len, [*labels, "all tokens"]))
    lines = [
        f"{'token':<{column}}  keys  values  layers 0 to {len(ranks) - 1}, "
        f"from {SHADES[1]} (nothing) to {SHADES[-1]} (all of {width})"
    ]
    mean = shares.mean(2, keepdims=True)
    for label, own in zip(
        [*labels, "all tokens"], np.moveaxis(np.concatenate([shares, mean], 2), 2, 0), strict=True
    ):
        keys, values = own.mean(0)
        bars = "".join(_bar(share) for share in own.mean(1))
        lines.append(f"{label:<{column}}  {keys:.2f}  {values:.2f}    {bars}")
    return "\n".join(lines)


def draw_ranks(
    ranks: Int[np.ndarray, "L 2 T"], tokens: Sequence[str], width: int, path: str
) -> None:
    """The same as a PNG: layers over tokens, keys above values.

    Raises:
        OSError: the file cannot be written; what was there before stays.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (2 + 0.22 * max(len(tokens), 12), 2 + 0.3 * max(len(ranks), 6))
    figure, axes = plt.subplots(2, 1, figsize=size, sharex=True, layout="constrained")
    try:
        for part, (axis, name) in enumerate(zip(axes, ("keys", "values"), strict=True)):
            image = axis.imshow(
                ranks[:, part] / width, vmin=0, vmax=1, aspect="auto", interpolation="nearest"
            )
            axis.set_ylabel("layer")
            axis.set_title(f"{name}: {ranks[:, part].mean() / width:.3f} of {width}", fontsize=10)
        axes[-1].set_xticks(range(len(tokens)), map(_label, tokens), rotation=90, fontsize=7)
        for label in axes[-1].get_xticklabels():
            label.set_parse_math(False)
        figure.colorbar(image, ax=axes, label="share of components kept")
        content = io.BytesIO()
        figure.savefig(content, dpi=130, format="png")
        write_atomically(pathlib.Path(path), content.getvalue())
    finally:
        plt.close(figure)


def _bar(share: float) -> str:
    return SHADES[max(1, round(share * (len(SHADES) - 1)))]


def _label(token: str) -> str:
    """A token on one line, its ends to be seen."""
    text = repr(token)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"
