"""How fast does a ledger load, and how long does a question to a large one take?

    python benchmarks/ledger.py [--runs 25] [--store DIR]

One dataset of two million pairs in twelve sources, and runs that each learn from all of it once, 64 pairs a step: 25
runs are fifty million rows of `step_pair` and nine million of `step_source`. Lines are those of `StepRecord`; a second
run's are the first's under another name, since making them takes longer than loading them. Loads everything into an
empty database, as `pairledger ledger load` does, then asks every query of docs/sql.md, of one run where it names one.
Without --store the files go to a temporary folder (0.6 GB a run, with the database). Writes
benchmarks/results/ledger_HARDWARE_YYYYMM.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from benchmarks.packing import RESULTS, hardware
from training.geometry import Counters
from training.ledger.facts import AttemptFacts, RunFacts, UsedDataset, write_facts
from training.ledger.record import PairRow, SourceRow, StepRecord
from training.ledger.store import load, query
from training.ledger.writer import close_attempt, open_attempt

PAIRS, SHARDS, STEP_PAIRS, PACK = 2_000_000, 10, 64, 512
SOURCES = tuple(f"source-{letter}" for letter in "abcdefghijkl")
DATASET = "ds1:" + "d" * 32
START = datetime(2026, 3, 1, tzinfo=UTC)
COOKBOOK = Path(__file__).parents[1] / "docs" / "sql.md"


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


def write_runs(store: Path, runs: int, lengths: np.ndarray, source: np.ndarray) -> None:
    """Run folders, each with its prediction and one finished attempt."""
    first: Path | None = None
    for number in range(runs):
        run_id = f"run-{number:03d}"
        run_dir = store / "runs" / run_id
        run_dir.mkdir(parents=True)
        used = UsedDataset(fingerprint=DATASET, path="datasets/s/2026-03-01/d")
        same = {"fingerprint": "run1:r", "plan": "plan1:p", "model": "mdl1:m", "reference": "ref1:f"}
        facts = RunFacts(run_id=run_id, **same, layout="shared", created_at=START, datasets=(used,))  # pyright: ignore[reportArgumentType]
        write_facts(run_dir / "run.json", facts)
        began = AttemptFacts(from_step=1, started_at=START, device="cpu", pack_tokens=PACK, peak_flops=1e12)
        attempt = open_attempt(run_dir, config_toml="", facts=began)
        if first is None:
            first, predicted = attempt.steps, list[dict[str, int]]()
            with first.open("wb") as file:
                for record in records(lengths, source):
                    file.write(record.to_line().encode() + b"\n")
                    counters = record.counters
                    assert counters is not None
                    counted = {name: getattr(counters, name) for name in Counters.__dataclass_fields__}
                    predicted.append({"step": record.step, "epoch": 0, **counted})
            table = pa.Table.from_pylist(predicted)
            table = table.append_column("cost_max_over_mean", pa.array(np.ones(len(table))))
            with pa.ipc.new_file(str(run_dir / "predicted.arrow"), table.schema) as writer:
                writer.write_table(table)
        else:
            own = b'"run_id":"%b"' % run_id.encode()
            attempt.steps.write_bytes(first.read_bytes().replace(b'"run_id":"run-000"', own))
            (run_dir / "predicted.arrow").write_bytes((first.parents[2] / "predicted.arrow").read_bytes())
        close_attempt(attempt, outcome="finished")


def loading(store: Path) -> list[str]:
    """Rows a second into an empty database, and what a load costs that finds nothing new."""
    ledgers = sum(path.stat().st_size for path in store.glob("runs/*/attempts/*/steps.jsonl"))
    lines = [f"Ledgers of {ledgers / 1e9:.1f} GB.", "", "| | rows | wall s | CPU s | rows a wall s | rows a CPU s |"]
    lines.append("|-|-:|-:|-:|-:|-:|")
    for what in ("everything into an empty database", "again, nothing new (every file is hashed)"):
        wall, cpu = time.perf_counter(), time.process_time()
        rows = load(store).rows
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        rates = f"{rows / wall:,.0f} | {rows / cpu:,.0f}" if rows else "|"
        lines.append(f"| {what} | {rows:,} | {wall:.1f} | {cpu:.1f} | {rates} |")
    tables = ("step_pair", "step_source", "step", "pair")
    sizes = [(name, query(store, f"select count(*) from {name}")[1][0][0]) for name in tables]
    size = (store / "ledger" / "writer.duckdb").stat().st_size
    return [*lines, "", ", ".join(f"{name} {rows:,}" for name, rows in sizes) + f"; database {size / 1e9:.1f} GB."]


def asking(store: Path) -> list[str]:
    """Seconds of each query of the cookbook, the best of two."""
    queries = dict(re.findall(r"```sql\n-- (\w+)\n(.*?)```", COOKBOOK.read_text(encoding="utf-8"), flags=re.DOTALL))
    lines, slow = ["| query | rows | seconds | of |", "|-|-:|-:|-|"], 0
    for name, sql in queries.items():
        own = re.sub(r"'[rs]'", "'run-001'", sql).replace("pair1:1", pair_id(77))
        best, rows = float("inf"), 0
        for _ in range(2):
            began = time.perf_counter()
            rows = len(query(store, own)[1])
            best = min(best, time.perf_counter() - began)
        one = own != sql
        slow += one and best > 2
        lines.append(f"| {name} | {rows:,} | {best:.2f} | {'one run' if one else 'all runs'} |")
    return [*lines, "", f"Queries of one run that take more than 2 s: {slow}."]


def measured(store: Path, runs: int) -> list[str]:
    """Make what is missing of the store, load it, ask it."""
    if not (store / "runs").exists():
        lengths, source = drawn()
        write_dataset(store / "datasets" / "s" / "2026-03-01" / "d", lengths, source)
        write_runs(store, runs, lengths, source)
    return [*loading(store), "", *asking(store)]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=25, help="runs of two million pairs each")
    parser.add_argument("--store", type=Path, help="folder to keep the files in, and to take them from when there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(given.store or Path(folder), given.runs)
    machine, slug = hardware()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent)
    now = datetime.now(UTC)
    report = [
        "# Loading and asking the ledger",
        "",
        f"{machine}; Python {platform.python_version()}, duckdb {duckdb.__version__}, pyarrow {pa.__version__}; commit "
        f"{commit.stdout.strip() or 'unknown'}; {now:%Y-%m-%d}. Load average while it ran: {os.getloadavg()[2]:.1f}.",
        "",
        *found,
        "",
    ]
    print("\n".join(report))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"ledger_{slug}_{now:%Y%m}.md").write_text("\n".join(report), encoding="utf-8")


if __name__ == "__main__":
    main()
