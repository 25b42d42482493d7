"""A plan's prediction and a run's ledger as shares and pictures over steps."""

from collections.abc import Sequence

import dagster as dg
import numpy as np
import pyarrow as pa

from assets import pictures
from assets.progress import numbers
from training.ledger.record import SourceRow, StepRecord


def predicted_shares(steps: pa.Table) -> dict[str, object]:
    """Shares over all predicted steps, and their picture."""
    step, window, source, loss, logical = (
        steps[name].to_numpy() for name in ("step", "window_tokens", "source_tokens", "loss_tokens", "logical_tokens")
    )
    series = {"pack fill": (step, source / window), "loss density": (step, loss / source)}
    return {
        "pack_fill": source.sum() / window.sum(),
        "loss_density": loss.sum() / source.sum(),
        "sharing": source.sum() / logical.sum(),
        "source_tokens": source.sum(),
        "predicted_shares": pictures.lines("predicted shares by step", series, x="step", y="share of tokens"),
    }


def shares(steps: Sequence[StepRecord]) -> dg.MarkdownMetadataValue:
    """Pack fill by step, and loss density by step and source; a step that is not known is a gap."""
    at = [record.step for record in steps]
    fill = [numbers(record)["pack_fill"] for record in steps]
    series = {"pack fill": (at, _gaps(fill))}
    for source in sorted({row.source for record in steps for row in record.sources}):
        rows = [next((row for row in record.sources if row.source == source), None) for record in steps]
        series[f"loss density, {source}"] = (at, _gaps([row and _density(row) for row in rows]))
    return pictures.lines("fill and loss density by step", series, x="step", y="share of tokens")


def _density(row: SourceRow) -> float | None:
    return row.loss_tokens / row.source_tokens if row.loss_tokens is not None and row.source_tokens else None


def learning(steps: Sequence[StepRecord]) -> dg.MarkdownMetadataValue:
    """Loss and accuracy by step, means over each step's pairs."""
    at, known = [record.step for record in steps], [numbers(record) for record in steps]
    series = {name: (at, _gaps([one[name] for one in known])) for name in ("loss", "accuracy")}
    return pictures.lines("loss and accuracy by step", series, x="step", y="of the step's pairs")


def _gaps(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values])
