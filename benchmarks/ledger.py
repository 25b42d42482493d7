"""How fast does a ledger load, and how long does a question to a large one take?

    python -m benchmarks.ledger [--runs 27] [--store DIR [--stage make|load|ask]]

One dataset of two million pairs in twelve sources, and runs that each learn from all of it once, 64 pairs a step: 27
runs are 54 million rows of `step_pair` and ten million of `step_source`. Lines are those of `StepRecord`; a second
run's are the first's under another name, since making them takes longer than loading them. Loads run by run into an
empty database, then as `pairledger ledger load` does, and asks every query of docs/sql.md, of one run where it names
one. Without --store the files go to a temporary folder (0.8 GB a run, with database and snapshot). The stages, one
after another, do what one call does; loading goes on where it was stopped. Writes
benchmarks/results/ledger_HARDWARE_YYYYMM.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.measure import report
from training.geometry import Counters
from training.ledger.database import open_writer
from training.ledger.facts import AttemptFacts, RunFacts, UsedDataset, write_facts
from training.ledger.loader import Loader, LoadReport
from training.ledger.record import PairRow, SourceRow, StepRecord
from training.ledger.store import load, query
from training.ledger.writer import close_attempt, open_attempt

PAIRS, SHARDS, STEP_PAIRS, PACK = 2_000_000, 10, 64, 512
SOURCES = tuple(f"source-{letter}" for letter in "abcdefghijkl")
DATASET = "ds1:" + "d" * 32
START = datetime(2026, 3, 1, tzinfo=UTC)
COOKBOOK = Path(__file__).parents[1] / "docs" / "sql.md"
RATES = "rates.jsonl"


def pair_id(index: int) -> str:
    """As long as a real one."""
    return f"pair1:{index * 2654435761 % 2**64:032x}"


def drawn() -> tuple[np.ndarray, np.ndarray]:
    """Lengths int[pairs, 3] (prompt, chosen, rejected) and source int[pairs]."""
    rng = np.random.default_rng(0)
    return rng.integers(2, 17, (PAIRS, 3)), rng.integers(0, len(SOURCES), PAIRS)


def write_dataset(folder: Path, lengths: np.ndarray, source: np.ndarray) -> None:
    """Shards and manifest as preparation writes them."""
    folder.mkdir(parents=True)
    size, shards = PAIRS // SHARDS, list[dict[str, Any]]()
    for number in range(SHARDS):
        rows = range(number * size, (number + 1) * size)
        columns: dict[str, Any] = {
            "pair_id": [pair_id(i) for i in rows],
            "source": [SOURCES[source[i]] for i in rows],
            "locator": [f"pairs.jsonl:{i + 1}" for i in rows],
            "chosen_mask": pa.nulls(size, pa.list_(pa.bool_())),
            "rejected_mask": pa.nulls(size, pa.list_(pa.bool_())),
        }
        for part, name in enumerate(("prompt", "chosen", "rejected")):
            offsets = np.concatenate([[0], np.cumsum(lengths[rows.start : rows.stop, part])]).astype(np.int32)
            columns[f"{name}_ids"] = pa.ListArray.from_arrays(offsets, pa.array(np.zeros(offsets[-1], np.int32)))
        table, path = pa.table(columns), folder / f"shard-{number:05d}.arrow"
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=1024)
        tokens = int(lengths[rows.start : rows.stop].sum())
        facts = {"rows": size, "tokens": tokens, "bytes": path.stat().st_size, "digest": "0"}
        shards.append({"file": path.name, **facts})
    (folder / "quarantine.jsonl").write_text("")
    totals = dict(zip(("prompt", "chosen", "rejected"), lengths.sum(0).tolist(), strict=True))
    manifest = {
        "format": 1,
        "fingerprint": DATASET,
        "inputs": {"source": "src1:s", "tokenizer": "tok1:t", "template": "tpl1:t", "recipe": "rec1:r"},
        "counts": {"rows": PAIRS, "pairs": PAIRS, "quarantined": 0},
        "tokens": totals,
        "shards": shards,
        "quarantine": {"file": "quarantine.jsonl", "rows": 0},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def records(lengths: np.ndarray, source: np.ndarray) -> Iterator[StepRecord]:
    """The steps of one epoch in an order of its own."""
    rng = np.random.default_rng(1)
    order = rng.permutation(PAIRS).reshape(-1, STEP_PAIRS)
    for step, rows in enumerate(order, 1):
        p, c, r = lengths[rows].T
        logps, losses, own = rng.normal(-80, 20, (4, STEP_PAIRS)), rng.random(STEP_PAIRS), source[rows]
        sizes = np.stack([p + c + r, 2 * p + c + r, c + r, c, r], 1)
        of_source: list[SourceRow] = []
        for code in np.unique(own):
            mine = own == code
            tokens = dict(zip(TOKENS, sizes[mine].sum(0).tolist(), strict=True))
            of_source.append(
                SourceRow(
                    source=SOURCES[code],
                    pairs=int(mine.sum()),
                    documents=2 * int(mine.sum()),
                    **tokens,
                    flops=1e9 * float(mine.sum()),
                    loss_sum=float(losses[mine].sum()),
                    wins=int((losses[mine] < 0.5).sum()),
                    ties=0,
                    chosen_reward_sum=float(logps[0][mine].sum()),
                    rejected_reward_sum=float(logps[1][mine].sum()),
                )
            )
        total = sizes.sum(0).tolist()
        packs = -(-total[0] // PACK)
        yield StepRecord(
            run_id="run-000",
            attempt=1,
            step=step,
            epoch=0,
            ended_at=START + timedelta(seconds=10 * step),
            counters=Counters(
                window_tokens=packs * PACK,
                physical_tokens=total[0],
                aligned_tokens=total[0],
                **dict(zip(TOKENS, total, strict=True)),
                documents=2 * STEP_PAIRS,
                pairs=STEP_PAIRS,
                packs=packs,
                max_document_tokens=int(np.maximum(p + c, p + r).max()),
                sum_document_tokens_squared=int(((p + c) ** 2 + (p + r) ** 2).sum()),
            ),
            flops=1e9 * STEP_PAIRS,
            ranks_expected=8,
            ranks_reported=8,
            loss=float(losses.mean()),
            grad_norm=float(rng.random()),
            learning_rate=1e-6,
            wins=int((losses < 0.5).sum()),
            ties=0,
            chosen_reward_sum=float(logps[0].sum()),
            rejected_reward_sum=float(logps[1].sum()),
            data_s=0.01,
            compute_s=float(rng.random()),
            optimizer_s=0.01,
            save_s=0.0,
            sources=tuple(of_source),
            pairs=tuple(
                PairRow(
                    dataset=DATASET,
                    shard=int(i) // (PAIRS // SHARDS),
                    row=int(i) % (PAIRS // SHARDS),
                    pair_id=pair_id(int(i)),
                    occurrence=0,
                    policy_chosen_logp=float(logps[0, k]),
                    policy_rejected_logp=float(logps[1, k]),
                    reference_chosen_logp=float(logps[2, k]),
                    reference_rejected_logp=float(logps[3, k]),
                    loss=float(losses[k]),
                )
                for k, i in enumerate(rows)
            ),
        )


TOKENS = ("source_tokens", "logical_tokens", "loss_tokens", "chosen_loss_tokens", "rejected_loss_tokens")


def write_runs(store: Path, runs: int) -> None:
    """Run folders that are missing, each with its prediction and one finished attempt."""
    first = store / "runs" / "run-000"
    for number in range(runs):
        run_dir = store / "runs" / f"run-{number:03d}"
        if run_dir.exists():
            continue
        staged = store / "staged"  # a run is there as a whole or not at all
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        used = UsedDataset(fingerprint=DATASET, path="datasets/s/2026-03-01/d")
        same = {"fingerprint": "run1:r", "plan": "plan1:p", "model": "mdl1:m", "reference": "ref1:f"}
        facts = RunFacts(run_id=run_dir.name, **same, layout="shared", created_at=START, datasets=(used,))  # pyright: ignore[reportArgumentType]
        write_facts(staged / "run.json", facts)
        began = AttemptFacts(from_step=1, started_at=START, device="cpu", pack_tokens=PACK, peak_flops=1e12)
        attempt = open_attempt(staged, config_toml="", facts=began)
        if number == 0:
            write_first(staged / "predicted.arrow", attempt.steps)
        else:
            own = b'"run_id":"%b"' % run_dir.name.encode()
            lines = (first / "attempts" / "0001" / "steps.jsonl").read_bytes()
            attempt.steps.write_bytes(lines.replace(b'"run_id":"run-000"', own))
            shutil.copy(first / "predicted.arrow", staged)
        close_attempt(attempt, outcome="finished")
        run_dir.parent.mkdir(exist_ok=True)
        staged.rename(run_dir)


def write_first(prediction: Path, ledger: Path) -> None:
    """The first run's ledger, and what was predicted of it."""
    predicted: list[dict[str, int]] = []
    with ledger.open("wb") as file:
        for record in records(*drawn()):
            file.write(record.to_line().encode() + b"\n")
            counters = record.counters
            assert counters is not None
            counted = {name: getattr(counters, name) for name in Counters.__dataclass_fields__}
            predicted.append({"step": record.step, "epoch": 0, **counted})
    table = pa.Table.from_pylist(predicted).append_column("cost_max_over_mean", pa.array(np.ones(len(predicted))))
    with pa.ipc.new_file(str(prediction), table.schema) as writer:
        writer.write_table(table)


def load_runs(store: Path) -> None:
    """Load run by run into a database that grows, and note how long each took; what is loaded is not loaded again."""
    (store / "ledger").mkdir(exist_ok=True)
    for run_dir in sorted((store / "runs").iterdir()):
        filled, connection = LoadReport(), open_writer(store / "ledger", 30)
        wall, cpu = time.perf_counter(), time.process_time()
        Loader(store, connection, filled).run(run_dir)
        connection.close()
        spent = time.perf_counter() - wall, time.process_time() - cpu
        if filled.rows:
            with (store / RATES).open("a") as file:
                file.write(json.dumps([filled.rows, *spent]) + "\n")


def loaded(store: Path) -> list[str]:
    """Rows a second of the runs' loads, what a load costs that publishes, and one that finds nothing new."""
    rows, wall, cpu = np.array([json.loads(line) for line in (store / RATES).open()]).T
    began = time.perf_counter(), time.process_time()
    load(store)  # datasets, and a snapshot
    first = time.perf_counter() - began[0], time.process_time() - began[1]
    began = time.perf_counter()
    load(store)
    again = time.perf_counter() - began
    size = (store / "ledger" / "writer.duckdb").stat().st_size
    bytes_of = sum(path.stat().st_size for path in store.glob("runs/*/attempts/*/steps.jsonl"))
    names = ("step_pair", "step_source", "step", "pair")
    counts = [f"{name} {query(store, f'select count(*) from {name}')[1][0][0]:,}" for name in names]
    return [
        f"Ledgers of {bytes_of / 1e9:.1f} GB become {', '.join(counts)}; the database is {size / 1e9:.1f} GB.",
        "",
        f"- Loading {len(rows)} ledgers, {rows.sum():,.0f} rows: {rows.sum() / cpu.sum():,.0f} rows a CPU second "
        f"(ledger by ledger {(rows / cpu).min():,.0f} to {(rows / cpu).max():,.0f}), {rows.sum() / wall.sum():,.0f} a "
        f"wall second (ledger by ledger {(rows / wall).min():,.0f} to {(rows / wall).max():,.0f}).",
        f"- Loading the dataset and publishing the snapshot: {first[0]:.1f} s, {first[1]:.1f} CPU s.",
        f"- Loading when nothing is new, all ledgers hashed: {again:.1f} s.",
    ]


def asking(store: Path) -> list[str]:
    """Seconds of each query of the cookbook, the best of two."""
    queries = dict(re.findall(r"```sql\n-- (\w+)\n(.*?)```", COOKBOOK.read_text(encoding="utf-8"), flags=re.DOTALL))
    lines, slow = ["| query | rows | seconds | of |", "|-|-:|-:|-|"], 0
    for name, sql in queries.items():
        own = sql.replace("'r'", "'run-001'").replace("'s'", "'run-000'")
        asked = own.replace("pair1:1", pair_id(77)).replace("file.jsonl:2", "pairs.jsonl:78")
        best, rows = float("inf"), 0
        for _ in range(2):
            began = time.perf_counter()
            rows = len(query(store, asked)[1])
            best = min(best, time.perf_counter() - began)
        one = own != sql
        slow += one and best > 2
        lines.append(f"| {name} | {rows:,} | {best:.2f} | {'one run' if one else 'all runs'} |")
    return [*lines, "", f"Queries of one run that take more than 2 s: {slow}."]


def make(store: Path, runs: int) -> None:
    """Write what is missing of the store."""
    if not (store / "datasets").exists():
        write_dataset(store / "datasets" / "s" / "2026-03-01" / "d", *drawn())
    write_runs(store, runs)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=27, help="runs of two million pairs each")
    parser.add_argument("--store", type=Path, help="folder to keep the files in, and to take them from when there")
    parser.add_argument(
        "--stage", choices=("make", "load", "ask"), help="one of the three stages, in a store that stays"
    )
    given = parser.parse_args()
    if given.stage and not given.store:
        parser.error("--stage needs --store")
    with tempfile.TemporaryDirectory() as folder:
        store: Path = given.store or Path(folder)
        if given.stage in (None, "make"):
            make(store, given.runs)
        if given.stage in (None, "load"):
            load_runs(store)
        if given.stage in (None, "ask"):
            setting = report.setting(("duckdb", "pyarrow"), f"load average {os.getloadavg()[2]:.1f}")
            report.write(
                "ledger", ["# Loading and asking the ledger", "", setting, "", *loaded(store), "", *asking(store)]
            )


if __name__ == "__main__":
    main()
