"""Small step records for the ledger's tests, every number given or 0."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from training.ledger.record import StepRecord

MOMENT = datetime(2026, 3, 1, 23, 30, tzinfo=UTC)


def record(step: int, **values: Any) -> StepRecord:
    """A step of run `r`, attempt 1, with unknown counters unless they are given."""
    given: dict[str, Any] = {
        "run_id": "r",
        "attempt": 1,
        "epoch": 0,
        "ended_at": MOMENT,
        "counters": None,
        "flops": None,
        "ranks_expected": 1,
        "ranks_reported": 1,
        "loss": 0.5,
        "grad_norm": 1.0,
        "learning_rate": 1e-6,
        "wins": 0,
        "ties": 0,
        "chosen_reward_sum": 0.0,
        "rejected_reward_sum": 0.0,
        "data_s": 0.25,
        "compute_s": 1.5,
        "optimizer_s": 0.25,
        "save_s": None,
        "sources": (),
        "pairs": (),
    }
    return StepRecord(step=step, **{**given, **values})
