"""The folder a dataset is written into: checked, locked, staged, and committed by its manifest.

A killed writer leaves a staging folder, which no reader looks into and the next writer removes. Two writers of one
folder take turns, and the second finds the work done.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from training.data.fingerprint import fp
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
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise DatasetError(f"{out}: cannot be written ({error.strerror}); name another --out") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
        if not any(out.iterdir()):
            out.rmdir()


@contextmanager
def staged(out: Path, inputs: dict[str, str]) -> Generator[Path]:
    """A folder inside the target for files that are not committed yet; gone afterwards, whatever happens."""
    for left in out.glob(".staging-*"):  # of a killed writer: the lock is ours
        shutil.rmtree(left)
    staging = out / f".staging-{fp('inputs', inputs).partition(':')[2][:12]}"
    staging.mkdir()
    try:
        yield staging
    except OSError as error:
        raise DatasetError(f"{out}: cannot be written ({error}); nothing was kept") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


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
