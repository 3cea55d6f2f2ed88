"""Draws the densities that a calibration comes from. Needs matplotlib."""

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvjax.thoughts.calibration import Calibration
from kvjax.thoughts.density import Fit

_TRIMODAL, _OTHER, _BORDER = "#1f6f8b", "#bbbbbb", "#c8553d"
_PANELS = 4  # where no layer is chosen: the best of those that were not


def draw(found: Fit, calibration: Calibration) -> bytes:
    """A PNG with one panel a chosen layer: every prompt's density, and the thresholds."""
    layers = found.layers or found.ranking[:_PANELS]
    figure = Figure(figsize=(7, 1.2 + 1.5 * len(layers)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(layers), sharex=True, squeeze=False)[:, 0]
    for axes, layer in zip(panels, layers, strict=True):
        for of_prompt in found.densities:
            one = of_prompt[layer]
            color, front = (_TRIMODAL, 3) if one.trimodal else (_OTHER, 2)
            axes.plot(one.grid, one.values, color=color, linewidth=1, zorder=front)
        for theta in found.thresholds or ():
            axes.axvline(theta, color=_BORDER, linestyle="--", linewidth=1)
        share = f"three modes on {found.trimodal[layer]:.0%} of {calibration.prompts} prompts"
        axes.set_title(f"layer {layer}: {share}", fontsize=8, loc="left")
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlim(-0.02, 1.02)
    panels[-1].set_xlabel("share of visible keys below 1 % of the row's largest weight")
    figure.suptitle(f"{calibration.model}: {_verdict(calibration)}", fontsize=9)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110, metadata={"Software": None})
    return content.getvalue()


def _verdict(calibration: Calibration) -> str:
    if calibration.thresholds is None:
        return "no layer is tri-modal (shown: the first in rank)"
    low, high = calibration.thresholds
    return f"execution below {low:.3f}, transition above {high:.3f}"
