"""What lies in run folders as Arrow tables, one for each table of the database.

Types are those that the record declares (`record.Column`); values were checked when the line was parsed, so Arrow only
copies them. Moments become UTC without a zone, as the database keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from training.errors import LedgerError
from training.ledger.facts import AttemptFacts, RunFacts
from training.ledger.record import COUNTERS, PAIR, SOURCE, STEP, Column

MOMENT = pa.timestamp("us")
TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string()}
OF_STEP = ("run_id", "attempt", "step")


def step_tables(lines: Sequence[Mapping[str, Any]]) -> dict[str, pa.Table]:
    """Parsed lines as tables `step`, `step_source` and `step_pair`."""
    steps: dict[str, pa.Array] = {
        name: pa.array([_utc(line[name]) for line in lines], MOMENT)
        if name == "ended_at"
        else _array(column, [line[name] for line in lines])
        for name, column in STEP.items()
    }
    for name, column in COUNTERS.items():
        steps[name] = _array(column, [line["counters"] and line["counters"][name] for line in lines])
    return {
        "step": pa.table(steps),
        "step_source": _inner(lines, "sources", SOURCE),
        "step_pair": _inner(lines, "pairs", PAIR),
    }


def _inner(lines: Sequence[Mapping[str, Any]], field: str, declared: Mapping[str, Column]) -> pa.Table:
    lengths = [len(line[field][next(iter(declared))]) for line in lines]
    of_line = pa.array(np.repeat(np.arange(len(lines)), lengths))
    columns = {name: _array(STEP[name], [line[name] for line in lines]).take(of_line) for name in OF_STEP}
    for name, column in declared.items():
        columns[name] = _array(column, list(chain.from_iterable(line[field][name] for line in lines)))
    return pa.table(columns)


def _array(column: Column, values: list[Any]) -> pa.Array:
    return pa.array(values, TYPES[column.kind])


def run_tables(facts: RunFacts) -> dict[str, pa.Table]:
    """`run.json` as tables `run` and `run_dataset`."""
    used = [{"run_id": facts.run_id, "dataset": d.fingerprint, "path": d.path} for d in facts.datasets]
    names = ("run_id", "partition", "fingerprint", "plan", "model", "reference", "layout")
    columns = {name: pa.array([getattr(facts, name)], pa.string()) for name in names}
    return {
        "run": pa.table({**columns, "created_at": pa.array([_utc(facts.created_at)], MOMENT)}),
        "run_dataset": pa.Table.from_pylist(used, pa.schema([(name, pa.string()) for name in used[0]] if used else [])),
    }


def attempt_table(facts: AttemptFacts, run_id: str, attempt: int) -> pa.Table:
    """`attempt.json` as a row of table `attempt`."""
    values = {"run_id": run_id, "attempt": attempt, **facts.model_dump(exclude={"format"})}
    return pa.table(
        {
            name: pa.array([_utc(value) if isinstance(value, datetime) else value], _type_of(value))
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


def _utc(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(tzinfo=None)
