"""A whole store that fits on a page: one dataset of five pairs, one run of four steps, every number worked out by hand.

    row source prompt chosen rejected | as laid out  logical  supervised  documents
     0    a      3      4       2     |      9         12       4 + 2       7, 5
     1    b      1      5       3     |      9         10       3 + 3       6, 4     (two chosen tokens are masked)
     2    a      2      2       2     |      6          8       2 + 2       4, 4
     3    b      4      1       1     |      6         10       1 + 1       5, 5
     4    a      1      1       1     |      3          4       1 + 1       2, 2     (held out)

Steps 1 to 4 take rows 0 1, 2 3, 1 2, 0 3 in packs of at most 16 tokens: two packs in step 1, one in each other.
A pair's margin is (-10 + 12) - (-11 + 11.5) = 1.5 nats, but (-13 + 12) - 0.5 = -1.5 for row 3.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from blake3 import blake3

from tests.training.ledger.records import record
from training.geometry import Counters
from training.ledger.facts import AttemptFacts, RunFacts, UsedDataset, write_facts
from training.ledger.meter import SourceCounts
from training.ledger.record import PairRow, SourceRow, StepRecord
from training.ledger.store import query
from training.ledger.validation import ValidationRow, append_validation
from training.ledger.writer import Attempt, LedgerWriter, close_attempt, open_attempt

DATASET = "ds1:" + "d" * 32
SOURCES = "ababa"
LENGTHS = [(3, 4, 2), (1, 5, 3), (2, 2, 2), (4, 1, 1), (1, 1, 1)]
MASKS = {1: [False, True, True, False, True]}
SIZES = [(9, 12, 6, 4, 2), (9, 10, 6, 3, 3), (6, 8, 4, 2, 2), (6, 10, 2, 1, 1), (3, 4, 2, 1, 1)]
STEPS = {1: (0, 1), 2: (2, 3), 3: (1, 2), 4: (0, 3)}
LOSSES = {1: (0.75, 0.65), 2: (0.6, 0.6), 3: (0.5, 0.5), 4: (0.4, 0.2)}
WINS = {1: (1, 0), 2: (1, 0), 3: (1, 1), 4: (1, 1)}
TIES = {1: (0, 1), 2: (0, 0), 3: (0, 0), 4: (0, 0)}
ORDER = [field for field in Counters.__dataclass_fields__]
COUNTERS = {
    # in the order of `Counters`: window physical aligned source logical, loss of both sides, and so on
    1: (32, 18, 18, 18, 22, 12, 7, 5, 4, 2, 2, 0, 7, 49 + 25 + 36 + 16),
    2: (16, 12, 12, 12, 18, 6, 3, 3, 4, 2, 1, 0, 5, 16 + 16 + 25 + 25),
    3: (16, 15, 15, 15, 18, 10, 5, 5, 4, 2, 1, 0, 6, 36 + 16 + 16 + 16),
    4: (16, 15, 15, 15, 22, 8, 5, 3, 4, 2, 1, 0, 7, 49 + 25 + 25 + 25),
}


def counters(step: int) -> Counters:
    """The step's counters."""
    return Counters(**dict(zip(ORDER, COUNTERS[step], strict=True)))


def step(number: int, attempt: int = 1, **changes: Any) -> StepRecord:
    """The step's record, as a run that does everything right writes it."""
    rows = STEPS[number]
    sources = tuple(
        SourceRow(
            source=SOURCES[row],
            pairs=1,
            documents=2,
            source_tokens=SIZES[row][0],
            logical_tokens=SIZES[row][1],
            loss_tokens=SIZES[row][2],
            chosen_loss_tokens=SIZES[row][3],
            rejected_loss_tokens=SIZES[row][4],
            flops=1000.0 * SIZES[row][0],
            loss_sum=loss,
            wins=win,
            ties=tie,
            chosen_reward_sum=0.2,
            rejected_reward_sum=-0.1,
        )
        for row, loss, win, tie in zip(rows, LOSSES[number], WINS[number], TIES[number], strict=True)
    )
    seen = [sum(row in STEPS[earlier] for earlier in range(1, number)) for row in rows]
    pairs = tuple(
        PairRow(
            dataset=DATASET,
            shard=0,
            row=row,
            pair_id=f"pair1:{row}",
            occurrence=times,
            policy_chosen_logp=-13.0 if row == 3 else -10.0,
            policy_rejected_logp=-12.0,
            reference_chosen_logp=-11.0,
            reference_rejected_logp=-11.5,
            loss=loss,
        )
        for row, times, loss in zip(rows, seen, LOSSES[number], strict=True)
    )
    made = record(
        number,
        attempt=attempt,
        epoch=(number - 1) // 2,
        ended_at=datetime(2026, 3, 1, 23, 10, tzinfo=UTC) + number * timedelta(minutes=20),
        counters=counters(number),
        flops=1000.0 * COUNTERS[number][3],
        loss=sum(LOSSES[number]) / 2,
        wins=sum(WINS[number]),
        ties=sum(TIES[number]),
        chosen_reward_sum=0.4,
        rejected_reward_sum=-0.2,
        data_s=0.5,
        compute_s=1.25,
        optimizer_s=0.25,
        save_s=9.0,
        sources=sources,
        pairs=pairs,
    )
    return replace(made, **changes)


def unknown(record: StepRecord, reason: str) -> StepRecord:
    """A step of two ranks of which one could not count."""
    counted = [f.name for f in fields(SourceCounts)]
    sources = tuple(replace(row, **dict.fromkeys(counted)) for row in record.sources)
    return replace(
        record, counters=None, flops=None, unknown_reason=reason, ranks_expected=2, loss=float("nan"), sources=sources
    )


def write_dataset(folder: Path, fingerprint: str = DATASET, locators: str = "file.jsonl") -> Path:
    """The dataset's folder: manifest, one shard in two record batches, and one quarantined row."""
    folder.mkdir(parents=True)
    columns: dict[str, Any] = {
        "pair_id": [f"pair1:{row}" for row in range(5)],
        "source": list(SOURCES),
        "locator": [f"{locators}:{row + 1}" for row in range(5)],
        "chosen_mask": pa.array([MASKS.get(row) for row in range(5)], pa.list_(pa.bool_())),
        "rejected_mask": pa.array([None] * 5, pa.list_(pa.bool_())),
    }
    for i, part in enumerate(("prompt", "chosen", "rejected")):
        columns[f"{part}_ids"] = pa.array([[7] * lengths[i] for lengths in LENGTHS], pa.list_(pa.int32()))
    table = pa.table(columns)
    with pa.ipc.new_file(str(folder / "shard-00000.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    bad = {"source": "a", "locator": f"{locators}:6", "reason": "identical", "detail": "both are 'x'", "row": "{}"}
    (folder / "quarantine.jsonl").write_text(json.dumps(bad) + "\n")
    shard, quarantine = folder / "shard-00000.arrow", folder / "quarantine.jsonl"
    manifest = {
        "format": 1,
        "fingerprint": fingerprint,
        "inputs": {"source": "src1:s", "tokenizer": "tok1:t", "template": "tpl1:t", "recipe": "rec1:r"},
        "counts": {"rows": 6, "pairs": 5, "quarantined": 1},
        "tokens": {"prompt": 11, "chosen": 13, "rejected": 9},
        "shards": [{"file": shard.name, "rows": 5, "tokens": 33, **_file(shard)}],
        "quarantine": {"file": quarantine.name, "rows": 1, **_file(quarantine)},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def _file(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "digest": blake3(path.read_bytes()).hexdigest()}


def write_run(
    store: Path, run_id: str = "r", *, dataset: str = "datasets/a/2026-03-01/d", predicted: bool = True
) -> Path:
    """The run's folder with its facts and its prediction, without any attempt."""
    run_dir = store / "runs" / run_id
    run_dir.mkdir(parents=True)
    facts = RunFacts(
        run_id=run_id,
        fingerprint="run1:r",
        plan="plan1:p",
        model="mdl1:m",
        reference="ref1:f",
        layout="shared",
        created_at=datetime(2026, 3, 1, 23, tzinfo=UTC),
        datasets=(UsedDataset(fingerprint=DATASET, path=dataset),),
    )
    write_facts(run_dir / "run.json", facts)
    if predicted:
        write_prediction(run_dir)
    return run_dir


def write_prediction(run_dir: Path, **changes: Any) -> None:
    """What the plan says of each step."""
    columns: dict[str, Any] = {"step": list(STEPS), "epoch": [0, 0, 1, 1]}
    columns |= {name: [values[i] for values in COUNTERS.values()] for i, name in enumerate(ORDER)}
    table = pa.table({**columns, "cost_max_over_mean": [1.0] * 4, **changes})
    with pa.ipc.new_file(str(run_dir / "predicted.arrow"), table.schema) as writer:
        writer.write_table(table)


def start(run_dir: Path, from_step: int = 1, **changes: Any) -> Attempt:
    """Open the run's next attempt."""
    facts = AttemptFacts(
        from_step=from_step,
        started_at=datetime(2026, 3, 1, 23, 29, tzinfo=UTC),
        device="cpu",
        pack_tokens=16,
        peak_flops=1e6,
    )
    return open_attempt(run_dir, config_toml="", facts=facts.model_copy(update=changes))


def train(
    run_dir: Path, steps: Iterable[StepRecord], from_step: int = 1, outcome: str | None = "finished", **changes: Any
) -> Attempt:
    """One attempt that writes these steps; an outcome of None is a process that was killed."""
    attempt = start(run_dir, from_step, **changes)
    writer = LedgerWriter(attempt.steps)
    for one in steps:
        writer.append(replace(one, attempt=attempt.number, run_id=run_dir.name))
    writer.close()
    if outcome:
        close_attempt(attempt, outcome=outcome)
    return attempt


def make_store(root: Path) -> Path:
    """The whole store, with its run finished in one attempt."""
    write_dataset(root / "datasets" / "a" / "2026-03-01" / "d")
    train(write_run(root), [step(number) for number in STEPS])
    return root


def make_two_runs(root: Path) -> Path:
    """The whole store, with held-out judgements and with a second run: killed after step 3, resumed at it, slow there.

    The last step of the second run is unknown.
    """
    make_store(root)
    judged = {"pairs": 4, "ties": 0, "chosen_reward_sum": 2.0, "rejected_reward_sum": 1.0, "loss_sum": 3.0}
    rows = [ValidationRow(step=number, source="a", wins=wins, **judged) for number, wins in ((2, 3), (4, 4))]
    append_validation(root / "runs" / "r" / "attempts" / "0001", rows)
    run_dir = write_run(root, "s")
    train(run_dir, [step(1), step(2), step(3)], outcome=None)
    last = unknown(step(4), "rank 1: no labels")
    train(run_dir, [step(3, compute_s=3.25), last], from_step=3, dagster_run_id="dagster-2")
    return root


TABLES = (
    *("run", "run_dataset", "attempt", "step", "step_source", "step_pair", "validation", "predicted"),
    *("dataset", "source", "shard", "pair", "quarantine", "loaded"),
)


def rows(store: Path, sql: str) -> list[tuple[Any, ...]]:
    """The rows of a query of the newest snapshot."""
    return query(store, sql)[1]


def everything(store: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table."""
    return {table: rows(store, f"select * from {table} order by all") for table in TABLES}
