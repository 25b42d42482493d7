"""Pictures that stand on an asset's page, as PNG inside Markdown, so that they need no server and outlive the store.

Figures are made without pyplot: it keeps global state, and runs may share a process. A picture is 10 to 30 kB.
"""

import base64
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

import dagster as dg
import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARTS = {"prompt": "#4c72b0", "chosen": "#55a868", "rejected": "#c44e52"}


def lengths(columns: Mapping[str, np.ndarray]) -> dg.MarkdownMetadataValue:
    """Histogram of tokens a part (`prompt`, `chosen`, `rejected`), on common bins."""
    figure, axes = _figure("tokens", "pairs")
    longest = max((int(values.max()) for values in columns.values() if len(values)), default=1)
    bins = np.linspace(0, longest + 1, 41).tolist()
    for part, values in columns.items():
        label = f"{part}, median {np.median(values):.0f}" if len(values) else part
        axes.hist(values, bins=bins, histtype="step", linewidth=1.6, color=PARTS.get(part), label=label)
    axes.legend(frameon=False)
    return _markdown(figure, "tokens of each part of a pair")


def lines(title: str, series: Mapping[str, tuple[ArrayLike, ArrayLike]], *, x: str, y: str) -> dg.MarkdownMetadataValue:
    """One line for each named series of (x values, y values); NaN leaves a gap."""
    figure, axes = _figure(x, y)
    for name, (xs, ys) in series.items():
        axes.plot(xs, ys, linewidth=1.4, marker="." if np.size(xs) < 40 else "", label=name)
    axes.grid(alpha=0.25)
    if series:
        axes.legend(frameon=False)
    return _markdown(figure, title)


def _figure(x: str, y: str) -> tuple["Figure", "Axes"]:
    from matplotlib.figure import Figure  # half a second that the code location need not spend

    figure = Figure(figsize=(7.2, 3.0), dpi=80, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _markdown(figure: "Figure", title: str) -> dg.MarkdownMetadataValue:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return dg.MetadataValue.md(f"![{title}](data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()})")
