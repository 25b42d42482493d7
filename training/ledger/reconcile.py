"""Plan, ledger and manifests held against one another, to the integer.

Three accounts of a run are made apart from each other: what the plan predicted from lengths alone, what the trainer
counted from the packs it computed, and what the shards say of each pair that a step names. The view `discrepancy`
compares them; here the ledger's files are compared with what was loaded of them as well, so that a line that cannot be
read, or one that is there twice, is a difference too. A run is sound when the list is empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from training.errors import LedgerError
from training.ledger.lines import line_blocks, read_lines
from training.ledger.record import parse_line
from training.ledger.store import query, runs
from training.ledger.writer import STEPS

SHOWN = 20
"""Differences that an error message spells out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One place where two accounts of a run disagree."""

    rule: str
    """What should be equal."""
    step: int | None
    subject: str
    expected: str
    found: str

    def __str__(self) -> str:
        """One line for a person."""
        place = f"step {self.step}, " if self.step is not None else ""
        return f"{self.rule}: {place}{self.subject}: {self.expected} expected, {self.found} found"


def reconcile(store_root: str | Path, run_id: str) -> list[Difference]:
    """Every difference between a run's plan, ledger and manifests, in the newest published database.

    Raises:
        LedgerError: the database does not know the run.
    """
    root = Path(store_root)
    if run_id not in runs(root):
        raise LedgerError(f"no run {run_id} is loaded; the newest are {runs(root)[:5]}; load, or name another run")
    sql = "select rule, step, subject, expected, found from discrepancy where run_id = ? order by all"
    _, rows = query(root, sql, [run_id])
    named = [dict(zip(("rule", "step", "subject", "expected", "found"), row, strict=True)) for row in rows]
    differences = [Difference(**row) for row in named]
    for path in sorted((root / "runs" / run_id / "attempts").glob(f"[0-9]*/{STEPS}")):
        differences += _file_differences(root, path)
    return differences


def require_reconciled(store_root: str | Path, run_id: str) -> None:
    """Nothing, when the run's accounts agree.

    Raises:
        LedgerError: they do not; the message spells out the first differences and says how many there are.
    """
    if differences := reconcile(store_root, run_id):
        raise LedgerError(differ(run_id, differences))


def differ(run_id: str, differences: Sequence[Difference]) -> str:
    """A run's differences for a person: how many there are, and the first of them."""
    shown = [str(difference) for difference in differences[:SHOWN]]
    more = [f"and {len(differences) - SHOWN} more"] if len(differences) > SHOWN else []
    head = f"run {run_id}: differences between plan, ledger and manifests: {len(differences)}"
    return "\n  ".join([head, *shown, *more])


def _file_differences(root: Path, path: Path) -> list[Difference]:
    """A ledger's lines that cannot be read or stand twice, and what of it is not in the database."""
    name, size, count, digest = path.relative_to(root).as_posix(), 0, 0, blake3()
    found: list[Difference] = []
    times: Counter[int] = Counter()
    with path.open("rb") as file:
        for block in line_blocks(file):
            if block.endswith(b"\n"):
                times += Counter(_steps(block, path, count, found, name))
                size, count = size + len(block), count + block.count(b"\n")
                digest.update(block)
    for step, lines in times.items():
        if lines > 1:
            found.append(_of_file("step once an attempt", name, "1 line", f"{lines} lines", step))
    rows = query(root, "select bytes, digest, lines from loaded where path = ?", [name])[1]
    loaded_size, loaded_digest, loaded = rows[0] if rows else (0, "", 0)
    if digest.hexdigest() != loaded_digest and (rows or count):
        found.append(_of_file("ledger is loaded", name, _amount(count, size), _amount(loaded, loaded_size)))
    return found


def _steps(block: bytes, path: Path, before: int, found: list[Difference], name: str) -> list[int]:
    """The steps of a block of lines; those that cannot be read become differences."""
    try:
        return read_lines(block, path, before + 1)["step"].to_pylist()
    except LedgerError:
        steps: list[int] = []
    for number, line in enumerate(block[:-1].split(b"\n"), before + 1):
        try:
            steps.append(parse_line(line)["step"])
        except LedgerError as error:
            found.append(_of_file("line can be read", f"{name}:{number}", "a step", str(error)))
    return steps


def _of_file(rule: str, subject: str, expected: str, found: str, step: int | None = None) -> Difference:
    return Difference(rule=rule, step=step, subject=subject, expected=expected, found=found)


def _amount(lines: Any, size: Any) -> str:
    return f"{lines} lines of {size} bytes in all"
