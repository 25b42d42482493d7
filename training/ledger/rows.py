"""What lies in run folders as Arrow tables, one for each table of the database.

Values were checked when they were read, so Arrow only copies them. Moments are UTC without a zone, as the database
keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from training.errors import LedgerError
from training.ledger.column import Column
from training.ledger.facts import AttemptFacts, RunFacts
from training.ledger.lines import MOMENT, TYPES, utc
from training.ledger.record import COUNTERS, PAIR, SOURCE, STEP

OF_STEP = ("run_id", "attempt", "step")


def step_tables(lines: pa.Table) -> dict[str, pa.Table]:
    """Read lines (`lines.LINES`) as tables `step`, `step_source` and `step_pair`."""
    counters = lines["counters"].combine_chunks()
    columns = {name: lines[name] for name in STEP} | dict(zip(COUNTERS, counters.flatten(), strict=True))
    return {
        "step": pa.table(columns),
        "step_source": _inner(lines, "sources", SOURCE),
        "step_pair": _inner(lines, "pairs", PAIR),
    }


def _inner(lines: pa.Table, field: str, declared: Mapping[str, Column]) -> pa.Table:
    lists = lines[field].combine_chunks().flatten()
    of_line = pc.call_function("list_parent_indices", [lists[0]])
    columns = {name: lines[name].combine_chunks().take(of_line) for name in OF_STEP}
    return pa.table({**columns, **{name: one.flatten() for name, one in zip(declared, lists, strict=True)}})


def run_tables(facts: RunFacts) -> dict[str, pa.Table]:
    """`run.json` as tables `run` and `run_dataset`."""
    used = [{"run_id": facts.run_id, "dataset": d.fingerprint, "path": d.path} for d in facts.datasets]
    names = ("run_id", "partition", "fingerprint", "plan", "model", "reference", "layout")
    columns = {name: pa.array([getattr(facts, name)], pa.string()) for name in names}
    return {
        "run": pa.table({**columns, "created_at": pa.array([utc(facts.created_at)], MOMENT)}),
        "run_dataset": pa.Table.from_pylist(used, pa.schema([(name, pa.string()) for name in used[0]] if used else [])),
    }


def attempt_table(facts: AttemptFacts, run_id: str, attempt: int) -> pa.Table:
    """`attempt.json` as a row of table `attempt`."""
    values = {"run_id": run_id, "attempt": attempt, **facts.model_dump(exclude={"format"})}
    return pa.table(
        {
            name: pa.array([utc(value) if isinstance(value, datetime) else value], _type_of(value))
            for name, value in values.items()
        }
    )


def _type_of(value: Any) -> pa.DataType:
    return MOMENT if isinstance(value, datetime) else TYPES.get(type(value), pa.null())


def predicted_table(path: Path, run_id: str) -> pa.Table:
    """`predicted.arrow` as table `predicted`.

    Raises:
        LedgerError: it is no Arrow file, or its columns are not a prediction's; names what differs.
    """
    wanted: dict[str, Any] = {"step": pa.int64(), "epoch": pa.int64(), **dict.fromkeys(COUNTERS, pa.int64())}
    wanted["cost_max_over_mean"] = pa.float64()
    try:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise LedgerError(f"{path}: is not an Arrow file: {error}") from None
    found: dict[str, Any] = dict(zip(table.schema.names, table.schema.types, strict=True))
    if found != wanted:
        differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        detail = ", ".join(
            f"{name} ({found.get(name, 'missing')}, not {wanted.get(name, 'known')})" for name in differing
        )
        raise LedgerError(f"{path}: columns are not those of a prediction: {detail}")
    return table.add_column(0, "run_id", pa.array([run_id] * len(table), pa.string()))
