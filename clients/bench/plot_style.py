"""How all pictures of the benchmarks look."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes

INK, GREY, RED = "#22262e", "#b9bec8", "#c0352b"
COLOURS = {
    "none": "#8a8f99",
    "ngram": "#b07a16",
    "suffix": "#8a4fa3",
    "eagle3": "#5a9e3d",
    "llamacpp": "#c9788f",
    "llamacpp-ngram": "#a3334f",
    "llamacpp-eagle3": "#e0559a",
    "frozen": "#12826e",
    "online": "#2457c5",
}
"""By mode."""

MOST_LABELS = 12
"""More version labels than this would run into each other."""


def clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color="#eceef2", lw=0.8)
    axes.set_axisbelow(True)


def label_versions(axes: Axes, labels: Sequence[tuple[float, int, str]]) -> None:
    """(place on the x axis, version, colour), in order; the last one is always written."""
    every = max(1, math.ceil(len(labels) / MOST_LABELS))
    for at, version, colour in [*reversed(labels)][::every]:
        axes.annotate(
            f"v{version}",
            (at, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=colour,
        )
