"""The folder a dataset is written into: checked, locked, staged, and committed by its manifest.

An interrupted writer leaves a staging folder, which no reader looks into; the next writer of the same goes on from it,
and one of anything else removes it. Two writers of one folder take turns, and the second finds the work done.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from training.data.fingerprint import fp
from training.data.journal import JOURNAL
from training.data.manifest import MANIFEST, QUARANTINE, Manifest, read_manifest, write_manifest
from training.data.shards import Dataset, open_dataset
from training.errors import ConfigError, DatasetError


def check_target(out: Path, *, by_fingerprint: bool) -> None:
    """A folder that holds something else is never written into."""
    if by_fingerprint or not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"--out {out}: is a file; name a folder")
    ours = ("shard-*.arrow", MANIFEST, QUARANTINE, f".{MANIFEST}", ".staging-*")
    foreign = sorted({path.name for path in out.iterdir()} - {path.name for kind in ours for path in out.glob(kind)})
    if foreign:
        raise ConfigError(
            f"--out {out}: holds other things than a dataset ({', '.join(foreign[:5])}); name a new folder"
        )


@contextmanager
def locked(out: Path) -> Generator[None]:
    """One writer of a folder at a time; another waits, and then finds the work done."""
    try:
        handle = _lock(out)
    except OSError as error:
        raise DatasetError(f"{out}: cannot be written ({error.strerror}); name another --out") from None
    try:
        yield
    finally:
        if not any(out.iterdir()):
            out.rmdir()
        os.close(handle)


def _lock(out: Path) -> int:
    """A locked handle of the folder; who waited while it was removed makes it anew."""
    while True:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), out.stat()):
                return handle
        os.close(handle)


@contextmanager
def staged(out: Path, *key: Any) -> Generator[Path]:
    """A folder inside the target for files that are not committed yet, known by all that decides their bytes.

    What was interrupted (killed, stopped by hand, out of disk or of memory) stays if a shard of it is finished, for the
    next writer with the same key to go on from; anything else is gone afterwards. Leftovers of other keys are removed.
    """
    staging = out / f".staging-{fp('staging', *key).partition(':')[2][:12]}"
    for left in out.glob(".staging-*"):  # the lock is ours, so their writers are dead
        if left != staging:
            shutil.rmtree(left)
    keeps = False
    try:
        staging.mkdir(exist_ok=True)
        yield staging
    except OSError as error:
        keeps = _finished_some(staging)
        go_on = f"what is finished lies in {staging}, and the same command goes on from there"
        kept = go_on if keeps else "nothing was kept"
        raise DatasetError(f"{out}: preparation was interrupted: {error}; {kept}") from None
    except KeyboardInterrupt:
        keeps = _finished_some(staging)
        raise
    finally:
        if not keeps:
            shutil.rmtree(staging, ignore_errors=True)


def _finished_some(staging: Path) -> bool:
    with suppress(OSError):
        return (staging / JOURNAL).stat().st_size > 0
    return False


def same_dataset(folder: Path, inputs: dict[str, str], about: dict[str, Any]) -> Dataset | None:
    """The verified dataset in a folder that was made of these inputs, if it is there and whole."""
    try:
        manifest = read_manifest(folder)
        same = dict(manifest.inputs) == inputs and manifest.source["name"] == about["name"]
        return open_dataset(folder) if same else None
    except DatasetError:
        return None  # damaged: it is made anew


def commit(staging: Path, final: Path, manifest: Manifest) -> None:
    """Move the files into place, the manifest last; an older version in the same folder disappears first."""
    final.mkdir(exist_ok=True)
    (final / MANIFEST).unlink(missing_ok=True)
    for old in (*final.glob("shard-*.arrow"), *final.glob(QUARANTINE)):
        old.unlink()
    for stored in (*manifest.shards, manifest.quarantine):
        (staging / stored.file).rename(final / stored.file)
    write_manifest(final, manifest)
