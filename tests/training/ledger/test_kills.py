"""Processes killed at random moments, and programs that hold the database: every step once, none wrong, none lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.training.ledger.place import STEPS_AN_EPOCH, Place, loader, make_place, python, trainer
from training.config import load_run
from training.errors import LedgerError
from training.ledger.reconcile import reconcile
from training.ledger.store import load, query, rebuild, snapshot
from training.run import run_training

pytestmark = pytest.mark.distributed

SECONDS = 300
"""Longest wait for anything here."""
MEASURED = ("attempt", "ended_at", "data_s", "compute_s", "optimizer_s", "save_s")
ACCOUNTS = {
    "current_step": f"* exclude ({', '.join(MEASURED)})",
    "current_step_source": "* exclude (attempt)",
    "current_step_pair": "* exclude (attempt)",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("place"))


def unbroken(place: Place, epochs: int, store: Path) -> Path:
    run_training(load_run(place.config(epochs)), store)
    load(store)
    return store


def accounts(store: Path) -> dict[str, list[tuple[Any, ...]]]:
    """All that steps computed, not when nor how fast."""
    return {view: query(store, f"select {what} from {view} order by all")[1] for view, what in ACCOUNTS.items()}


def lines(store: Path) -> list[tuple[int, int]]:
    """(attempt, step) of every whole line of the run's ledgers, read without the product's readers."""
    return [
        (int(path.parent.name), json.loads(line)["step"])
        for path in sorted(store.glob("runs/*/attempts/*/steps.jsonl"))
        for line in path.read_bytes().split(b"\n")[:-1]
    ]


def first_steps(store: Path) -> dict[int, int]:
    found = store.glob("runs/*/attempts/*/attempt.json")
    return {int(path.parent.name): json.loads(path.read_text())["from_step"] for path in found}


def waited(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    return output


def kill(process: subprocess.Popen[str]) -> None:
    """As `kill -9` does; nothing where it has ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(SECONDS)
    if process.stdout is not None:
        process.stdout.close()


@contextmanager
def killed_at_the_end(*processes: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            kill(process)


def killed_on_the_way(config: Path, store: Path, kills: int, farthest: int, rng: random.Random) -> None:
    """Kill trainer, loader or both so many times, each after some new lines and a moment; then let the trainer end."""
    start = {"trainer": lambda: trainer(config, store), "loader": lambda: loader(store)}
    running = {name: started() for name, started in start.items()}
    try:
        for number in range(kills):
            wanted, end = len(lines(store)) + rng.randint(1, farthest), time.monotonic() + SECONDS
            while len(lines(store)) < wanted and running["trainer"].poll() is None:
                assert time.monotonic() < end, "the trainer makes no steps"
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.1))
            for name in (("trainer",), ("loader",), ("trainer", "loader"))[number % 3]:
                assert running[name].poll() is None, (number, name, running[name].communicate())
                kill(running[name])
                running[name] = start[name]()
        waited(running["trainer"])
    finally:
        for process in running.values():
            kill(process)


@pytest.mark.parametrize(("kills", "epochs", "farthest"), [(3, 4, 10), pytest.param(20, 12, 8, marks=pytest.mark.slow)])
def test_every_step_is_there_once_and_none_is_wrong(
    place: Place, tmp_path: Path, kills: int, epochs: int, farthest: int
) -> None:
    seed = int(os.environ.get("PAIRLEDGER_SEED", time.time_ns() % 1_000_000))
    print(f"PAIRLEDGER_SEED={seed}")  # shown where this fails
    store = tmp_path / "killed"
    killed_on_the_way(place.config(epochs), store, kills, farthest, random.Random(seed))
    load(store)
    whole = unbroken(place, epochs, tmp_path / "unbroken")

    steps = range(1, STEPS_AN_EPOCH * epochs + 1)
    assert query(store, "select step from current_step order by step")[1] == [(step,) for step in steps]
    assert accounts(store) == accounts(whole)
    (run_id,) = query(store, "select run_id from run")[1][0]
    assert reconcile(store, run_id) == []

    # of every line, the files alone say whether a later attempt made it void
    started = first_steps(store)
    assert len(started) == 1 + sum(number % 3 != 1 for number in range(kills))
    void = {(a, s) for a, s in lines(store) if any(b > a and first <= s for b, first in started.items())}
    assert void, "no step was made twice; nothing was tried"
    assert set(query(store, "select attempt, step from waste")[1]) == void
    assert query(store, "select wasted_steps, attempts from run_summary")[1] == [(len(void), len(started))]
    assert len(lines(store)) == len(set(lines(store))) == len(steps) + len(void)

    before = {table: query(store, f"select * from {table} order by all")[1] for table in ("step", "step_pair")}
    rebuild(store)
    assert {table: query(store, f"select * from {table} order by all")[1] for table in before} == before


HOLD = """
import duckdb, sys, time
while True:
    try:
        held = duckdb.connect(sys.argv[1])
        break
    except duckdb.IOException:  # a loader has it just now
        time.sleep(0.01)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


def test_programs_that_hold_the_database_stop_neither_training_nor_loading(place: Place, tmp_path: Path) -> None:
    """A notebook with the snapshot, a shell with the writer's file read-write, and two loaders, all at once."""
    store = tmp_path / "held"
    unbroken(place, 1, store)
    notebook = duckdb.connect(str(snapshot(store)), read_only=True)
    loaders = loader(store), loader(store)
    shell = python("-c", HOLD, str(store / "ledger" / "writer.duckdb"), "3")
    training = trainer(place.config(2), store)
    with killed_at_the_end(training, shell, *loaders), notebook:
        assert shell.stdout is not None and shell.stdout.readline() == "held\n"
        waited(training)
        waited(shell)
        load(store)
        assert [process.poll() for process in loaders] == [None, None]
        assert notebook.execute("select count(*) from current_step").fetchone() == (STEPS_AN_EPOCH,)
    steps = range(1, 2 * STEPS_AN_EPOCH + 1)
    assert query(store, "select step from current_step order by step")[1] == [(step,) for step in steps]
    assert accounts(store) == accounts(unbroken(place, 2, tmp_path / "free"))


def test_a_snapshot_that_someone_holds_for_writing_is_named_and_the_next_load_publishes_another(tmp_path: Path) -> None:
    load(tmp_path)
    shell = python("-c", HOLD, str(snapshot(tmp_path)), "600")
    with killed_at_the_end(shell):
        assert shell.stdout is not None and shell.stdout.readline() == "held\n"
        with pytest.raises(LedgerError, match="holds it open for writing"):
            query(tmp_path, "select 1")
        load(tmp_path)
        assert query(tmp_path, "select count(*) from step")[1] == [(0,)]
