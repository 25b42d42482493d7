"""What a checkpoint says of itself, and which checkpoints there are: all that needs no weights and no torch.

    checkpoints/step_8/  dcp/  state.json  manifest.json

The manifest is written last, by rename: a step without one does not exist. It holds the run's identity by field, so
that what would resume it can be compared before any weight is read, and every file's digest, so that files are opened
only after they proved to be what was written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from training.data.fingerprint import differing
from training.errors import IdentityError, TrainingError

FORMAT = 2
MANIFEST = "manifest.json"

REMEDIES = {
    "tokenizer": "prepare the datasets with the tokenizer the run began with",
    "template": "prepare the datasets with the chat template the run began with",
    "recipe": "prepare the datasets with the limits the run began with",
    "datasets": "name the datasets the run began with",
    "plan": "restore [data] and [plan] as they were",
    "model": "name the model the run began from",
    "reference": "use the reference the run began with",
    "objective": "restore [objective] as it was",
    "optimizer": "restore [optimizer] as it was",
    "schedule": "restore the schedule and warm-up as they were",
    "precision": "restore model.dtype",
    "layout": "restore plan.layout",
    "adapter": "restore [model.lora] as it was",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field of a run's identity that is not what its checkpoint was saved with, and what to do about it."""

    field: str
    saved: str | None
    current: str | None
    remedy: str

    def __str__(self) -> str:
        return f"{self.field} was {self.saved}, and is {self.current}: {self.remedy}, or start another run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint; its manifest is read, its other files are not."""

    folder: Path
    step: int
    manifest: Mapping[str, Any]


def compare(manifest: Mapping[str, Any], identity: Mapping[str, str]) -> list[Difference]:
    """How a run's identity differs from a checkpoint's; topology, epochs and places on disk are no part of it."""
    return [
        Difference(field=name, saved=saved, current=current, remedy=REMEDIES.get(name, "restore it"))
        for name, saved, current in differing(manifest["identity"], identity)
    ]


def check_identity(checkpoint: Checkpoint, identity: Mapping[str, str]) -> None:
    """Refuse to resume another run.

    Raises:
        IdentityError: names every field that differs, with both values and the remedy.
    """
    found = compare(checkpoint.manifest, identity)
    if found:
        raise IdentityError(f"{checkpoint.folder}: cannot be resumed: " + "; ".join(map(str, found)))


def complete(folder: Path) -> tuple[list[Checkpoint], list[str]]:
    """The complete checkpoints of a run, newest first, and sentences on the folders that are none."""
    found: list[Checkpoint] = []
    skipped: list[str] = []
    for step, path in sorted(_steps(folder), reverse=True):
        manifest = _manifest(path)
        if manifest is not None:
            found.append(Checkpoint(folder=path, step=step, manifest=manifest))
        else:
            skipped.append(f"{path} is incomplete (no manifest of format {FORMAT}) and is skipped")
    return found, skipped


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder that a person named; links and relative paths are one place.

    Raises:
        IdentityError: it is none; of a folder with a model it says how that can be used.
    """
    path = folder.resolve()
    manifest = _manifest(path)
    if manifest is not None:
        return Checkpoint(folder=path, step=manifest["step"], manifest=manifest)
    if (path / "config.json").is_file():
        raise IdentityError(
            f"{folder}: is a model, not a checkpoint: it has weights, but no optimizer, plan or ledger position to "
            "resume from; set model.path to it, and a new run starts from these weights"
        )
    raise IdentityError(f"{folder}: is no complete checkpoint (no manifest of format {FORMAT}); name a step_N folder")


def altered(checkpoint: Checkpoint, names: Iterable[str]) -> str | None:
    """What is wrong with the first of these files that is not as the manifest says; None when all are."""
    for name in names:
        file, digest = checkpoint.folder / name, checkpoint.manifest["files"][name]
        found = digest_of(file) if file.is_file() else "missing"
        if found != digest:
            return f"{file}: digest {found}, but its manifest says {digest}"
    return None


def commit(path: Path, *, step: int, identity: Mapping[str, str], facts: Mapping[str, Any]) -> None:
    """Make a folder whose files are all written a checkpoint."""
    files = {str(f.relative_to(path)): digest_of(f) for f in sorted(path.rglob("*")) if f.is_file()}
    manifest = {"format": FORMAT, "step": step, "identity": dict(identity), **facts, "files": files}
    staging = path / f".{MANIFEST}"
    with staging.open("w", encoding="utf-8") as out:
        out.write(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        out.flush()
        os.fsync(out.fileno())
    staging.rename(path / MANIFEST)


def retain(folder: Path, *, keep: int, every: int | None) -> None:
    """Remove checkpoints but the newest `keep`, each `every`-th step and the one whose held-out loss is the lowest.

    Folders older than the newest checkpoint that are none are removed as well: a killed process left them.
    """
    found, _ = complete(folder)
    judged = [c for c in found if c.manifest.get("held_out_loss") is not None]
    best = min(judged, key=lambda c: (c.manifest["held_out_loss"], -c.step), default=None)
    kept = {c.step for c in found[:keep]} | {c.step for c in found if every and c.step % every == 0}
    kept |= {best.step} if best else set()
    for step, path in _steps(folder):
        if step not in kept and found and step < found[0].step:
            (path / MANIFEST).unlink(missing_ok=True)  # first: a removal that is cut short leaves no checkpoint
            shutil.rmtree(path)


def check_space(folder: Path, needed: int) -> None:
    """Refuse a save that cannot fit.

    Raises:
        TrainingError: names the folder, what is free and what is needed.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise TrainingError(
            f"{folder}: has {free} bytes free, and a checkpoint takes about {needed}; free the disk, or lower "
            "save.keep. The newest complete checkpoint is untouched"
        )


def digest_of(path: Path) -> str:
    """A file's digest, read by all cores."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _steps(folder: Path) -> list[tuple[int, Path]]:
    found = [(p.name.removeprefix("step_"), p) for p in folder.glob("step_*") if p.is_dir()]
    return [(int(number), path) for number, path in found if number.isdecimal()]


def _manifest(path: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if manifest.get("format") == FORMAT else None
