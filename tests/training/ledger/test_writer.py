"""Appending steps: durable, never in training's way, and honest about what is missing."""

from __future__ import annotations

import errno
import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.training.ledger.records import record
from training.errors import LedgerError
from training.ledger.facts import AttemptFacts, read_facts
from training.ledger.writer import CutLine, LedgerWriter, close_attempt, open_attempt, read_ledger

FACTS = AttemptFacts(from_step=1, started_at=datetime(2026, 3, 1, tzinfo=UTC), device="cpu", pack_tokens=64)


def test_each_line_is_on_the_disk_when_append_returns(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path / "steps.jsonl")
    for step in (1, 2, 3):
        assert writer.append(record(step))
        assert read_ledger(writer.path) == ([record(s) for s in range(1, step + 1)], None)
    writer.close()
    assert (writer.waiting, writer.gaps) == ((), [])


def test_case_cut_last_line_is_recognised_and_said(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path / "steps.jsonl")
    writer.append(record(1))
    writer.append(record(2))
    writer.close()
    whole = writer.path.read_bytes()
    first = whole.index(b"\n") + 1
    for kept in range(first + 1, len(whole)):
        writer.path.write_bytes(whole[:kept])
        assert read_ledger(writer.path) == ([record(1)], CutLine(number=2, size=kept - first))
    writer.path.write_bytes(whole[:first])
    assert read_ledger(writer.path) == ([record(1)], None)


def test_a_broken_line_before_the_last_is_no_cut(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(record(1).to_line() + "\n" + record(2).to_line()[:-5] + "\n" + record(3).to_line() + "\n")
    with pytest.raises(LedgerError, match=r"steps\.jsonl:2: not strict JSON"):
        read_ledger(path)


def test_text_may_hold_unicode_line_separators(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path / "steps.jsonl")
    strange = record(1, unknown_reason="a\u2028b\u0085c\rd\ne")
    writer.append(strange)
    writer.close()
    assert read_ledger(writer.path) == ([strange], None)


def test_a_folder_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LedgerError, match="a run needs a folder"):
        LedgerWriter(tmp_path / "missing" / "steps.jsonl")

    def read_only(*_: Any, **__: Any) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", read_only)  # the superuser may write anywhere, so the refusal is played
    with pytest.raises(LedgerError, match="Read-only file system"):
        LedgerWriter(tmp_path / "steps.jsonl")
    with pytest.raises(LedgerError, match="cannot be written"):
        monkeypatch.setattr(Path, "mkdir", read_only)
        open_attempt(tmp_path, config_toml="", facts=FACTS)


def test_a_ledger_is_never_written_twice(tmp_path: Path) -> None:
    LedgerWriter(tmp_path / "steps.jsonl").close()
    with pytest.raises(LedgerError, match="is there already"):
        LedgerWriter(tmp_path / "steps.jsonl")


class FullDisk:
    """`os.pwrite` of a disk with `room` bytes left, which takes what it can before it refuses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int):
        self.room, self._write = room, os.pwrite
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, descriptor: int, data: bytes, offset: int) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = self._write(descriptor, data[: self.room], offset)
        self.room -= done
        return done


def test_a_full_disk_does_not_stop_training_and_nothing_is_lost_when_it_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(record(1).to_line()) + 1
    disk = FullDisk(monkeypatch, room=size + size // 2)
    writer = LedgerWriter(tmp_path / "steps.jsonl")
    assert writer.append(record(1))
    assert not writer.append(record(2))
    assert read_ledger(writer.path) == ([record(1)], None)  # half a line was taken back
    assert not writer.append(record(3))
    assert writer.waiting == (2, 3)
    disk.room = 10**9
    assert writer.append(record(4))
    writer.close()
    assert read_ledger(writer.path) == ([record(step) for step in (1, 2, 3, 4)], None)
    assert writer.gaps == ["steps 2 to 3 waited in memory (No space left on device) and came late"]


def test_a_disk_that_stays_full_is_named_when_the_ledger_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LedgerWriter(tmp_path / "steps.jsonl")
    writer.append(record(1))
    FullDisk(monkeypatch, room=0)
    assert not writer.append(record(2))
    assert not writer.flush()
    with pytest.raises(LedgerError, match=r"step 2 lost \(No space left on device\)"):
        writer.close()
    assert writer.gaps == ["step 2 lost (No space left on device)"]
    assert read_ledger(writer.path) == ([record(1)], None)


def test_attempts_are_numbered_upwards_whoever_starts_them(tmp_path: Path) -> None:
    first = open_attempt(tmp_path, config_toml="a = 1\n", facts=FACTS)
    assert (first.number, first.folder.name, first.steps.name) == (1, "0001", "steps.jsonl")
    assert (first.folder / "config.toml").read_text() == "a = 1\n"
    (tmp_path / "attempts" / "0011").mkdir()  # latest is by number, not by name
    (tmp_path / "attempts" / "notes").mkdir()
    assert open_attempt(tmp_path, config_toml="", facts=FACTS).number == 12


def test_attempts_that_start_together_get_numbers_of_their_own(tmp_path: Path) -> None:
    numbers: list[int] = []

    def start() -> None:
        numbers.append(open_attempt(tmp_path, config_toml="", facts=FACTS).number)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 9))
    assert sorted(p.name for p in (tmp_path / "attempts").iterdir()) == [f"{n:04d}" for n in range(1, 9)]


def test_an_attempt_says_how_it_ended_and_what_its_ledger_could_not_keep(tmp_path: Path) -> None:
    attempt = open_attempt(tmp_path, config_toml="", facts=FACTS)
    close_attempt(attempt, outcome="finished", gaps=["step 2 lost (No space left on device)"])
    facts = read_facts(attempt.folder / "attempt.json", AttemptFacts)
    assert (facts.outcome, facts.gap) == ("finished", "step 2 lost (No space left on device)")
    assert facts.ended_at is not None and facts.ended_at.utcoffset() is not None
    assert facts.model_copy(update={"ended_at": None, "outcome": None, "gap": None}) == FACTS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
        ({"format": 2}, "format: Input should be 1"),
        ({"from_step": True}, "from_step: Input should be a valid integer"),
        ({"from_step": 1.0}, "from_step: Input should be a valid integer"),
        ({"started_at": "2026-03-01T00:00:00"}, "started_at: Input should have timezone info"),
    ],
)
def test_facts_are_read_strictly(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "attempt.json"
    path.write_text(json.dumps(json.loads(FACTS.model_dump_json()) | change))
    with pytest.raises(LedgerError, match=said):
        read_facts(path, AttemptFacts)
