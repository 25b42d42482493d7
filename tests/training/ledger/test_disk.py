"""Disks that refuse, as a real trainer meets them: full, full for a while, read-only; and a line that was cut."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from tests.training.ledger.place import STEPS_AN_EPOCH, Place, make_place, trainer
from training.config import load_run
from training.ledger.reconcile import reconcile
from training.ledger.store import load, query
from training.ledger.writer import read_ledger
from training.run import run_training

pytestmark = pytest.mark.distributed

SECONDS = 300
"""Longest wait for anything here."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def run_id(place: Place, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The run's id, which does not depend on its epochs."""
    return run_training(load_run(place.config(1)), tmp_path_factory.mktemp("store")).run_id


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A small disk of its own at a folder; skips where this user may not mount one."""
    folder.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=SECONDS)
    return process.returncode, output


def until(true: Callable[[], Any], process: subprocess.Popen[str], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end and process.poll() is None, (what, process.poll())
        time.sleep(0.002)


def facts(run_dir: Path, attempt: int = 1) -> dict[str, Any]:
    return json.loads((run_dir / "attempts" / f"{attempt:04d}" / "attempt.json").read_text())


def last_step(ledger: Path) -> int:
    return len(ledger.read_bytes().split(b"\n")) - 1 if ledger.exists() else 0


def saved(run_dir: Path) -> int:
    """Number of the newest step with a folder of its own."""
    return max((int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step_*")), default=0)


def test_a_file_that_may_not_grow_stops_no_training_and_the_gap_stands_in_the_attempt(
    place: Place, tmp_path: Path, run_id: str
) -> None:
    """The ledger meets its limit of 300 KiB after some hundred steps; no other file comes near."""
    store, epochs = tmp_path / "store", 12
    code, output = ended(trainer(place.config(epochs), store, before="ulimit -f 300"))
    run_dir, total = store / "runs" / run_id, STEPS_AN_EPOCH * epochs
    records, cut = read_ledger(run_dir / "attempts" / "0001" / "steps.jsonl")
    kept = len(records)
    assert 60 < kept < total - 10 and cut is None  # what was written of the next line was taken back
    assert [record.step for record in records] == list(range(1, kept + 1))
    assert f"step {total}/{total}" in output and (run_dir / "export" / "model.safetensors").exists()
    lost = f"steps {kept + 1} to {total} lost (File too large)"
    assert code == 1 and re.search(rf"^error: .*{re.escape(lost)}", output, re.MULTILINE), output[-2000:]
    assert (facts(run_dir)["outcome"], facts(run_dir)["gap"]) == ("finished", lost)
    load(store)
    assert query(store, "select gap from attempt")[1] == [(lost,)]
    missing = {difference.step for difference in reconcile(store, run_id) if difference.found == "missing"}
    assert missing == set(range(kept + 1, total + 1))


@pytest.mark.parametrize("freed", [True, False])
def test_a_disk_that_fills_up_while_training(place: Place, tmp_path: Path, run_id: str, freed: bool) -> None:
    store, epochs = tmp_path / "store", 12
    run_dir, total = store / "runs" / run_id, STEPS_AN_EPOCH * epochs
    attempt = run_dir / "attempts" / "0001"
    with ExitStack() as held:
        held.enter_context(mounted(run_dir / "attempts", "size=1m"))
        process = held.enter_context(trainer(place.config(epochs), store))
        held.callback(process.kill)
        until(lambda: last_step(attempt / "steps.jsonl") >= 3, process, "three steps")
        with (run_dir / "attempts" / "filler").open("wb", buffering=0) as filler:
            while True:
                try:
                    filler.write(bytes(512))
                except OSError:
                    break
        seen = last_step(attempt / "steps.jsonl")
        if freed:
            until(lambda: saved(run_dir) > seen + 5, process, "more than five steps on a full disk")
            (run_dir / "attempts" / "filler").unlink()
        code, output = ended(process)
        steps = [record.step for record in read_ledger(attempt / "steps.jsonl")[0]]
        gap = facts(run_dir)["gap"]
    assert f"step {total}/{total}" in output and (run_dir / "export").exists()
    assert "waits in memory: No space left on device" in output
    if freed:
        assert code == 0 and steps == list(range(1, total + 1))
        assert re.fullmatch(r"steps? \d+( to \d+)? waited in memory \(No space left on device\) and came late", gap)
    else:
        assert code == 1 and steps == list(range(1, len(steps) + 1)) and 3 <= len(steps) < total
        assert gap == f"steps {len(steps) + 1} to {total} lost (No space left on device)"


def test_a_folder_that_cannot_be_written_is_refused_before_training(place: Place, tmp_path: Path, run_id: str) -> None:
    store = tmp_path / "store"
    run_dir = store / "runs" / run_id
    with mounted(run_dir / "attempts", "ro"):
        code, output = ended(trainer(place.config(1), store))
    assert code == 1 and "Traceback" not in output
    assert f"error: {run_dir / 'attempts'}: cannot be written (Read-only file system)" in output
    assert "step 1/" not in output and not list((run_dir / "checkpoints").glob("*"))


def test_a_line_that_was_cut_is_said_and_its_step_made_again(
    place: Place, tmp_path: Path, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store, epochs = tmp_path / "store", 4
    ledger = store / "runs" / run_id / "attempts" / "0001" / "steps.jsonl"
    process = trainer(place.config(epochs), store)
    until(lambda: last_step(ledger) >= 7, process, "seven steps")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    whole = last_step(ledger)
    next_line = ledger.read_bytes().split(b"\n")[-2][:100]
    with ledger.open("ab") as file:
        file.write(next_line)  # as far as the process had come with it
    assert main(["ledger", "load", "--store", str(store)]) == 0
    assert f"{ledger}:{whole + 1}: the last line was cut after 100 bytes" in capsys.readouterr().err
    code, output = ended(trainer(place.config(epochs), store))
    assert code == 0, output
    load(store)
    steps = range(1, STEPS_AN_EPOCH * epochs + 1)
    assert query(store, "select step from current_step order by step")[1] == [(step,) for step in steps]
    assert reconcile(store, run_id) == []
    assert query(store, "select cut_line from loaded where cut_line is not null")[1] == [(whole + 1,)]
