"""What a run shows while it trains: observations made from its ledger file, which is the only thing read.

Pipes messages of a process surface when it ends; an observation logged by the step that waits is on the asset's page
within seconds. The run tells nobody about it and is never asked: a missing, unfinished or strange file is no progress.
"""

import json
import time
from pathlib import Path

import dagster as dg

from assets.reporting import portable
from training.errors import LedgerError
from training.ledger.record import StepRecord
from training.ledger.writer import complete_lines


class Progress:
    """Called by the launcher while it waits; logs at most one observation in `every_s` seconds."""

    def __init__(self, context: dg.AssetExecutionContext, runs: Path, every_s: float = 5.0) -> None:
        self._context = context
        self._runs = runs
        self._every_s = every_s
        self._next = 0.0
        self._seen = 0

    def __call__(self) -> None:
        """Log the newest complete line of the attempt's ledger, if there is one that was not seen."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every_s
        record = _newest(_ledger(self._runs, self._context.run.run_id))
        if record is None or record.step == self._seen:
            return
        self._seen = record.step
        self._context.log_event(
            dg.AssetObservation(
                asset_key=self._context.asset_key,
                partition=self._context.partition_key,
                metadata=portable(numbers(record)),
            )
        )


def numbers(record: StepRecord) -> dict[str, float | int | None]:
    """A step's numbers that a person watches; None where the step's counters are unknown."""
    counters = record.counters
    return {
        "step": record.step,
        "loss": record.loss,
        "accuracy": record.wins / counters.pairs if record.wins is not None and counters else None,
        "pack_fill": counters.source_tokens / counters.window_tokens if counters else None,
        "loss_density": counters.loss_tokens / counters.source_tokens if counters else None,
    }


def _ledger(runs: Path, dagster_run_id: str) -> Path | None:
    for facts in runs.glob("*/attempts/*/attempt.json"):
        try:
            if json.loads(facts.read_text(encoding="utf-8")).get("dagster_run_id") == dagster_run_id:
                return facts.with_name("steps.jsonl")
        except (OSError, ValueError):
            continue
    return None


def _newest(ledger: Path | None) -> StepRecord | None:
    try:
        lines, _ = complete_lines(ledger.read_bytes() if ledger else b"")
        return StepRecord.from_line(lines[-1]) if lines else None
    except (OSError, LedgerError):
        return None
