"""How a policy judged held-out pairs while it trained: `validation.jsonl` of an attempt, a line a step and source.

Sums over pairs, so that any mean is exact. A line of a step that a later attempt made again is void with that step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from training.errors import LedgerError
from training.ledger.writer import complete_lines

VALIDATION = "validation.jsonl"


class ValidationRow(BaseModel):
    """One source's held-out pairs at one step; `loss_sum` is the objective's, rewards are beta * log ratio."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    step: int
    source: str
    pairs: int
    wins: int
    ties: int
    chosen_reward_sum: float | None
    rejected_reward_sum: float | None
    loss_sum: float | None
    """None where it is not finite."""


def append_validation(folder: Path, rows: Iterable[ValidationRow]) -> None:
    """Add a step's rows to an attempt's folder, and sync them."""
    with (folder / VALIDATION).open("a", encoding="utf-8") as file:
        file.write("".join(row.model_dump_json() + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


def read_validation(path: Path) -> list[ValidationRow]:
    """The rows of a file; a cut last line is not one.

    Raises:
        LedgerError: a line cannot be read; names file, line and field.
    """
    rows: list[ValidationRow] = []
    for number, line in enumerate(complete_lines(path.read_bytes())[0], 1):
        try:
            rows.append(ValidationRow.model_validate_json(line))
        except ValidationError as error:
            fault = error.errors()[0]
            raise LedgerError(f"{path}:{number}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None
    return rows


def validation_table(path: Path, run_id: str, attempt: int) -> pa.Table:
    """The rows of a file as table `validation`; of a (step, source) written twice, the last one."""
    rows = {(row.step, row.source): row.model_dump() for row in read_validation(path)}
    key = pa.schema([("run_id", pa.string()), ("attempt", pa.int64())])
    counts = [(name, pa.int64()) for name in ("pairs", "wins", "ties")]
    sums = [(name, pa.float64()) for name in ("chosen_reward_sum", "rejected_reward_sum", "loss_sum")]
    schema = pa.schema([*key, ("step", pa.int64()), ("source", pa.string()), *counts, *sums])
    return pa.Table.from_pylist([{"run_id": run_id, "attempt": attempt, **row} for row in rows.values()], schema)
