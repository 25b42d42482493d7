"""Appending to a run's ledger, and reading it back.

Each start of a run is an attempt with a folder of its own, numbered upwards whoever starts it; its `steps.jsonl` gets
one line a step, written and synced before the next. A disk that fills up while training must not stop it: lines that
could not be written are kept, tried again with each later step, and the gap is reported; a line is written whole or
taken back, so that a later line never follows half of one. The only line that can be cut is the last one of a process
that was killed; the reader recognises it by its missing newline. Cost: one fsync a step.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from training.errors import LedgerError
from training.ledger.facts import ATTEMPT, AttemptFacts, read_facts, sync_folder, write_facts
from training.ledger.record import StepRecord

log = logging.getLogger(__name__)

STEPS = "steps.jsonl"
RESERVE = ".reserve"
"""A file that is taken away when an attempt ends, so that a full disk has room for how it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of a run."""

    number: int
    folder: Path

    @property
    def steps(self) -> Path:
        """Where its ledger lies."""
        return self.folder / STEPS


def open_attempt(run_dir: str | Path, *, config_toml: str, facts: AttemptFacts) -> Attempt:
    """Make the next attempt's folder, with `config.toml` and `attempt.json` in it; it appears whole or not at all.

    Raises:
        LedgerError: the run folder cannot be written.
    """
    attempts = Path(run_dir) / "attempts"
    try:
        attempts.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=".new-", dir=attempts))
        staged.chmod(0o755)
        (staged / "config.toml").write_text(config_toml, encoding="utf-8")
        write_facts(staged / ATTEMPT, facts)
        (staged / RESERVE).write_bytes(os.urandom(8192))  # no file system makes nothing of it
        while True:
            number = max((int(p.name) for p in attempts.iterdir() if p.name.isdigit()), default=0) + 1
            try:
                staged.rename(attempts / f"{number:04d}")
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # else another start took this number
                    raise
            else:
                sync_folder(attempts)
                return Attempt(number=number, folder=attempts / f"{number:04d}")
    except OSError as error:
        raise LedgerError(
            f"{attempts}: cannot be written ({error.strerror}); a run needs a folder it can keep its ledger in"
        ) from None


def close_attempt(attempt: Attempt, *, outcome: str, gaps: Sequence[str] = ()) -> None:
    """Record how an attempt ended (`finished`, `stopped` or `failed`) and what its ledger could not keep in time.

    A disk that refuses even that leaves the attempt as one that was killed, with a warning.
    """
    path = attempt.folder / ATTEMPT
    ended = {"ended_at": datetime.now(UTC), "outcome": outcome, "gap": "; ".join(gaps) or None}
    try:
        (attempt.folder / RESERVE).unlink(missing_ok=True)
        write_facts(path, read_facts(path, AttemptFacts).model_copy(update=ended))
    except OSError as error:
        log.warning("%s: that the attempt %s is not recorded: %s", path, outcome, error.strerror)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutLine:
    """The last line of a process that was killed while writing it."""

    number: int
    """From 1."""
    size: int
    """Bytes of it that are there."""


class LedgerWriter:
    """The one writer of an attempt's `steps.jsonl`.

    Raises:
        LedgerError: the file is there already, or cannot be made: said before training, not after an hour of it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._end = 0
        self._waiting: list[tuple[int, bytes]] = []
        self._refused: tuple[tuple[int, ...], str] | None = None  # steps of the last refusal, and why
        self.gaps: list[str] = []
        """Sentences about lines that could not be written at once; `close_attempt` records them."""
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            sync_folder(self.path.parent)
        except FileExistsError:
            raise LedgerError(f"{self.path}: is there already; each attempt writes a ledger of its own") from None
        except OSError as error:
            raise LedgerError(
                f"{self.path}: cannot be written ({error.strerror}); a run needs a folder it can write its ledger to"
            ) from None

    @property
    def waiting(self) -> tuple[int, ...]:
        """Steps whose lines are in memory only; empty unless the disk refuses them."""
        return tuple(step for step, _ in self._waiting)

    def append(self, record: StepRecord) -> bool:
        """Write the step's line and sync it; True when no line is waiting.

        Never raises for a disk that refuses: the line waits, and this and each later call tries again.
        """
        self._waiting.append((record.step, record.to_line().encode() + b"\n"))
        return self.flush()

    def flush(self) -> bool:
        """Try to write the waiting lines; True when none is left. Call it before a checkpoint is committed."""
        if not self._waiting:
            return True
        data = b"".join(line for _, line in self._waiting)
        try:
            self._write(data)
        except OSError as error:
            if self._refused is None:
                log.warning("%s: step %d waits in memory: %s", self.path, self._waiting[0][0], error.strerror)
            self._refused = self.waiting, error.strerror or str(error)
            return False
        self._end += len(data)
        self._waiting.clear()
        if self._refused is not None:
            steps, reason = self._refused
            self._refused = None
            self.gaps.append(f"{_span(steps)} waited in memory ({reason}) and came late")
            log.warning("%s: %s", self.path, self.gaps[-1])
        return True

    def close(self) -> None:
        """Try once more to write what waits, and close.

        Raises:
            LedgerError: lines could not be written to the end; the steps are named (and stand in `gaps`).
        """
        self.flush()
        os.close(self._file)
        if self._refused is not None:
            steps, reason = self._refused
            self.gaps.append(f"{_span(steps)} lost ({reason})")
            raise LedgerError(
                f"{self.path}: {self.gaps[-1]}; what was trained is not touched, but the account has a gap: "
                f"free the disk and resume from a checkpoint before step {steps[0]} to account for these steps"
            )

    def _write(self, data: bytes) -> None:
        try:
            done = 0
            while done < len(data):  # a nearly full disk takes a part without an error
                done += os.pwrite(self._file, data[done:], self._end + done)
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise


def _span(steps: tuple[int, ...]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def read_ledger(path: str | Path) -> tuple[list[StepRecord], CutLine | None]:
    """All steps of a ledger in the order they were written, and the cut last line if there is one.

    Raises:
        LedgerError: a line that is not the cut last one cannot be read; names file, line and field.
    """
    lines, cut = complete_lines(Path(path).read_bytes())
    records: list[StepRecord] = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(StepRecord.from_line(line))
        except LedgerError as error:
            raise LedgerError(f"{path}:{number}: {error}") from None
    return records, cut


def complete_lines(data: bytes) -> tuple[list[bytes], CutLine | None]:
    """The lines that end in a newline, and what follows the last newline.

    Only the newline byte ends a line: text in it may hold any other separator of Unicode.
    """
    *lines, rest = data.split(b"\n")
    return lines, CutLine(number=len(lines) + 1, size=len(rest)) if rest else None
