"""What a run shows while it trains: observations made from its ledger file, which is the only thing read.

Pipes messages of a process surface when it ends; an observation logged by the step that waits is on the asset's page
within seconds. The run tells nobody about it and is never asked: a missing, unfinished or strange file is no progress.
"""

import time
from pathlib import Path

import dagster as dg

from assets.reporting import portable
from training.errors import LedgerError
from training.ledger.facts import ATTEMPT, AttemptFacts, read_facts
from training.ledger.record import StepRecord
from training.ledger.writer import STEPS, complete_lines, read_ledger


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
        record = _newest(self._runs, self._context.run.run_id)
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


def recorded(run_dir: Path) -> list[StepRecord]:
    """The steps of a run that stand: those that no later attempt made again, in order.

    Raises:
        LedgerError: an attempt's facts or a line of its ledger cannot be read.
    """
    standing: dict[int, StepRecord] = {}
    for attempt in sorted(run_dir.glob("attempts/*"), key=lambda folder: int(folder.name)):
        first = read_facts(attempt / ATTEMPT, AttemptFacts).from_step
        standing = {step: record for step, record in standing.items() if step < first}
        if (attempt / STEPS).exists():
            standing.update((record.step, record) for record in read_ledger(attempt / STEPS)[0])
    return [standing[step] for step in sorted(standing)]


def _newest(runs: Path, dagster_run_id: str) -> StepRecord | None:
    """The last whole line of the ledger of the attempt that this Dagster run started."""
    for facts in runs.glob(f"*/attempts/*/{ATTEMPT}"):
        try:
            if read_facts(facts, AttemptFacts).dagster_run_id == dagster_run_id:
                lines, _ = complete_lines(facts.with_name(STEPS).read_bytes())
                return StepRecord.from_line(lines[-1]) if lines else None
        except (OSError, LedgerError):
            continue
    return None
