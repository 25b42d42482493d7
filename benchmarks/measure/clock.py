"""CPU seconds of variants that take turns, and their ratios.

Wall time measures a machine's other guests, and so does the CPU time of runs that stood apart; variants that take turns
meet the same weather. A ratio is made inside each round, and told with its spread over the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio's middle value over rounds, and the lowest and highest."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f}–{self.high:.2f})"


def one_thread() -> None:
    """Everything below is told for one thread."""
    torch.set_num_threads(1)


def seconds(function: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    started = time.process_time()
    function()
    return time.process_time() - started


def interleaved(variants: Mapping[str, Callable[[], object]], rounds: int, *, warm: int = 0) -> dict[str, list[float]]:
    """CPU seconds of each variant, which take turns for so many rounds after `warm` rounds that do not count."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(warm + rounds):
        for name, function in variants.items():
            took = seconds(function)
            if number >= warm:
                found[name].append(took)
    return found


def ratio(above: Iterable[float], below: Iterable[float]) -> Ratio:
    """Of two variants' seconds, round by round."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return Ratio(min(ratios), statistics.median(ratios), max(ratios))


def middle(values: Iterable[float]) -> float:
    """Median."""
    return statistics.median(values)
