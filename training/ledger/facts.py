"""What a run and each of its attempts say about themselves: `run.json` and `attempt.json`.

They are small, written whole by rename, and read strictly: an unknown field, a foreign format or a value of another
type is refused by name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from training.errors import LedgerError

RUN = "run.json"
ATTEMPT = "attempt.json"
PREDICTED = "predicted.arrow"


class Facts(BaseModel):
    """A JSON object with declared fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1


class UsedDataset(BaseModel):
    """A prepared dataset that a run reads: what it is, and where it lay."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    fingerprint: str
    path: str
    """Folder; relative to the store where it lies inside it."""


class RunFacts(Facts):
    """`run.json`: what a run is, whoever starts it; every field but `created_at` and the paths is its identity."""

    run_id: str
    partition: str | None = None
    fingerprint: str
    plan: str
    model: str
    reference: str | None = None
    layout: Literal["shared", "concat"]
    created_at: AwareDatetime
    datasets: tuple[UsedDataset, ...]


class AttemptFacts(Facts):
    """`attempt.json`: one start of a run; the last three fields are filled in when it ends."""

    dagster_run_id: str | None = None
    from_step: int
    """First step this attempt makes, 1 for a fresh start; it voids what earlier attempts recorded from there on."""
    started_at: AwareDatetime
    device: str
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ulysses: int = 1
    pack_tokens: int
    peak_flops: float | None = None
    """Declared peak of one device in FLOP/s."""
    ended_at: AwareDatetime | None = None
    outcome: str | None = None
    gap: str | None = None
    """Steps whose lines came late or were lost because the disk refused them."""


Kind = TypeVar("Kind", bound=Facts)


def write_facts(path: Path, facts: Facts) -> None:
    """Write facts whole, by rename, and synced."""
    new = path.with_name(f".{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        file.write(facts.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_folder(path.parent)


def read_facts(path: Path, kind: type[Kind]) -> Kind:
    """Read facts back.

    Raises:
        LedgerError: the file is missing, is not JSON, or has a field that does not belong; names file and field.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise LedgerError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise LedgerError(f"{path}: " + "; ".join(faults)) from None


def sync_folder(folder: Path) -> None:
    """Make a name that was created or renamed in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
