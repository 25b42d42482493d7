"""The pictures of a run's report: lines over steps, parts of a step's time, and what became of tokens.

Drawn without pyplot, which keeps global state. A line of many steps is drawn faintly, with its running mean over a
fortieth of the run on top, so that a long run shows its course and its noise. Unknown values are gaps. A picture is 15
to 60 kB of PNG, whatever the number of steps.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = Sequence[float | None]
Series = tuple[Sequence[int], Values]
"""Steps, and a value for each."""
COLOURS = ("#2f5d8a", "#d1793b", "#4b8f5c", "#8a5a9e", "#b8434e", "#5f9ea0", "#8c7a3d", "#7f7f7f")
INK, FAINT = "#33373d", "#d9dce1"
MARKED, SMOOTHED = 60, 80
"""Fewer steps than the first are marked one by one; more than the second are smoothed."""


class Picture(Protocol):
    """Something with a title that draws itself."""

    @property
    def title(self) -> str:
        """What it shows, in a few words."""
        ...

    @property
    def caption(self) -> str:
        """How to read it, in a sentence."""
        ...

    @property
    def height(self) -> float:
        """Of the picture in inches; it is 6.4 wide."""
        ...

    def draw(self, axes: Axes) -> None:
        """Draw into empty axes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A line for each named series; `dots` are series of few points, such as held-out pairs.

    A unit that begins with `share` is drawn from 0 to 100 %.
    """

    title: str
    caption: str
    unit: str
    lines: Mapping[str, Series]
    dots: Mapping[str, Series] = field(default_factory=dict[str, Series])
    height: float = 2.9

    def draw(self, axes: Axes) -> None:
        """Draw into empty axes."""
        for (name, (steps, values)), colour in zip(self.lines.items(), COLOURS * 9, strict=False):
            known, smooth = _gapped(values), len(steps) > SMOOTHED
            marker, alpha, width = (
                ("o" if len(steps) < MARKED else ""),
                (0.25 if smooth else 1),
                (0.7 if smooth else 1.6),
            )
            label = None if smooth else name
            axes.plot(
                steps, known, color=colour, alpha=alpha, linewidth=width, marker=marker, markersize=3, label=label
            )
            if smooth:
                axes.plot(steps, running_mean(known, len(steps) // 40), color=colour, linewidth=1.8, label=name)
        for (name, (steps, values)), colour in zip(self.dots.items(), COLOURS[1:], strict=False):
            axes.plot(
                steps, _gapped(values), color=colour, linewidth=1, linestyle="--", marker="D", markersize=5, label=name
            )
        if self.unit.startswith("share"):
            axes.set_ylim(0, 1.03)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        else:
            axes.yaxis.set_major_formatter(lambda value, _: short(value))
        axes.set_ylabel(self.unit)
        _over_steps(axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What each step consists of, one part upon the other; of many steps, their running means."""

    title: str
    caption: str
    unit: str
    steps: Sequence[int]
    parts: Mapping[str, Values]
    height: float = 2.9

    def draw(self, axes: Axes) -> None:
        """Draw into empty axes."""
        known = [np.nan_to_num(_gapped(values)) for values in self.parts.values()]
        if len(self.steps) > SMOOTHED:
            axes.plot(self.steps, np.sum(known, axis=0), color=INK, alpha=0.25, linewidth=0.7, label="step by step")
            known = [running_mean(part, len(self.steps) // 40) for part in known]
        axes.stackplot(self.steps, known, labels=list(self.parts), colors=COLOURS, linewidth=0)
        axes.set_ylim(0, None)
        axes.set_ylabel(self.unit)
        _over_steps(axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """A bar for each name, with its amount and its share of all."""

    title: str
    caption: str
    amounts: Mapping[str, float]

    @property
    def height(self) -> float:
        """Room for each bar."""
        return 0.7 + 0.42 * len(self.amounts)

    def draw(self, axes: Axes) -> None:
        """Draw into empty axes."""
        names, values = list(self.amounts), list(self.amounts.values())
        whole = sum(values) or 1.0
        axes.barh(names, values, color=COLOURS[: len(names)], height=0.62)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.32 * max([*values, whole / 10]))
        for place, value in enumerate(values):
            axes.text(value, place, f"  {short(value)}  ({value / whole:.1%})", va="center", color=INK, fontsize=9)
        axes.set_xticks([])
        axes.tick_params(left=False)
        axes.spines[["left", "bottom"]].set_visible(False)


def png(picture: Picture, dpi: int = 180) -> bytes:
    """The picture as PNG, without its title."""
    from matplotlib.figure import Figure  # half a second, which loading the ledger need not spend

    figure = Figure(figsize=(6.4, picture.height), dpi=dpi, layout="constrained")
    axes: Axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9)
    picture.draw(axes)
    axes.yaxis.label.set_color(INK)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _over_steps(axes: Axes) -> None:
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("step", color=INK)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    named = axes.get_legend_handles_labels()[1]
    axes.legend(
        frameon=False,
        fontsize=8.5,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=min(len(named), 4),
        borderaxespad=0.1,
    )


def _gapped(values: Values) -> npt.NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def running_mean(values: npt.NDArray[np.float64], width: int) -> npt.NDArray[np.float64]:
    """The mean of the known values among up to `width` on either side; nan where none is known."""
    known = ~np.isnan(values)
    sums, counts = (np.concatenate([[0], np.cumsum(x)]) for x in (np.where(known, values, 0), known))
    place = np.arange(len(values))
    low, high = np.maximum(place - width, 0), np.minimum(place + width + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def short(value: float) -> str:
    """A number as a person says it: 1.2 M, 340 k, 0.05."""
    for size, unit in ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= max(0.9995 * size, 9999.5):  # below, all digits are as short
            return f"{value / size:.3g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
