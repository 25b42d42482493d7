"""One writer, any number of readers: published copies, and programs that hold what is not theirs."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.training.ledger import shop
from tests.training.ledger.records import record
from tests.training.ledger.shop import rows
from training.errors import LedgerError
from training.ledger import database, publish
from training.ledger.store import load, query, snapshot
from training.ledger.writer import LedgerWriter


def test_case_reader_while_writer(store: Path) -> None:
    run_dir = shop.write_run(store, "s")
    attempt = shop.start(run_dir)
    writer = LedgerWriter(attempt.steps)
    load(store)
    held = duckdb.connect(str(snapshot(store)), read_only=True)  # a notebook that someone forgot
    seen: list[int] = []
    ask = "from training.ledger.store import query; import sys\n"
    ask += "while sys.stdin.readline(): print(query(sys.argv[1], sys.argv[2])[1][0][0], flush=True)"
    newest = "select max(step) from step where run_id = 's'"
    other = subprocess.Popen(
        [sys.executable, "-c", ask, str(store), newest], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None and other.stdout is not None
    for number in range(1, 21):
        writer.append(record(number, run_id="s"))
        load(store)
        other.stdin.write("ask\n")
        other.stdin.flush()
        seen.append(int(other.stdout.readline()))
    other.communicate()
    assert seen == list(range(1, 21))  # every question is answered, none behind the last load
    assert held.execute("select count(*) from step where run_id = 's'").fetchone() == (0,)  # its own, whole copy
    held.close()
    assert len(publish.published(store / "ledger")) == publish.KEEP
    assert rows(store, "select count(*), count(distinct step) from step where run_id = 's'") == [(20, 20)]


def test_a_load_that_could_not_publish_is_published_by_the_next(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(store)
    shop.train(shop.write_run(store, "s"), [shop.step(1)])

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(shutil, "copyfile", full)
        with pytest.raises(LedgerError, match="cannot be published"):
            load(store)
    assert rows(store, "select count(*) from run") == [(1,)]  # readers keep the last one
    again = load(store)
    assert again.files == 0 and again.snapshot != first.snapshot
    assert rows(store, "select count(*) from run") == [(2,)]


def test_writers_queue_for_a_bounded_time(store: Path) -> None:
    load(store)
    with (
        database.sole_writer(store / "ledger", 1),
        pytest.raises(LedgerError, match=r"another process has been loading for more than 0\.2 s"),
    ):
        load(store, wait_s=0.2)
    assert load(store, wait_s=0.2).files == 0


def test_a_program_that_holds_the_writers_file_is_waited_for_and_named(store: Path) -> None:
    load(store)
    hold = "import duckdb, sys; c = duckdb.connect(sys.argv[1]); print('held', flush=True); sys.stdin.readline()"
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(store / "ledger" / "writer.duckdb")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    with pytest.raises(LedgerError, match="is held open by another program"):
        load(store, wait_s=0.2)
    other.communicate("\n")
    assert load(store).files == 0


def test_queries_can_only_read_the_snapshot(store: Path, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="load the ledgers first"):
        query(store, "select 1")
    load(store)
    for sql in (
        "delete from step",
        "create table x (i int)",
        f"copy step to '{tmp_path / 'out.csv'}'",
        f"attach '{tmp_path / 'other.duckdb'}'",
        "select * from read_text('/etc/hostname')",
        "set enable_external_access = true",
        "select * from nowhere",
        "selekt",
    ):
        with pytest.raises(LedgerError, match="the query was refused"):
            query(store, sql)
    assert not (tmp_path / "out.csv").exists()
    assert query(store, "select step, loss from step where step = ?", [4]) == (["step", "loss"], [(4, (0.4 + 0.2) / 2)])
