"""Reference scores: the log-probabilities of a dataset's pairs under a frozen model, computed once and read by all.

They lie in `references/DATASET/MODEL-PRECISION/`, one Arrow file a shard of the dataset and a manifest that is written
last. A run reads them where dataset, model and precision are its own, and refuses them by name where they are not; they
are never recomputed in silence while a run trains. Packs hold as many tokens as training's, so that a policy equal to
its reference starts at ln 2: exactly where the packs are the same, else to the rounding of the kernels (about 1e-6 a
token in fp32).
"""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial as partial_of
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from training.data.packing import pack
from training.data.table import PairTable
from training.errors import DatasetError, IdentityError, Stopped
from training.geometry import Layout
from training.model import Policy
from training.parallel.agree import together
from training.parallel.device import Device
from training.parallel.mesh import ALONE, World
from training.receipt import MANIFEST, digest_of
from training.scores import Batch, batch_of, side_logps

if TYPE_CHECKING:
    from training.data.shards import Dataset
    from training.data.tokenize import TokenizedPair

log = logging.getLogger("training")

FORMAT = 1
GROUP = 2048
"""Pairs that are packed together."""

Floats = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Told how many pairs of how many are done."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceScores:
    """Scores of one dataset: int64[pairs] keys (shard and row), rising, and float32[pairs] summed log-probs."""

    dataset: str
    model: str
    precision: str
    key: npt.NDArray[np.int64]
    chosen: Floats
    rejected: Floats


def place_of(store: Path, dataset: str, model: str, precision: str) -> Path:
    """The folder of a dataset's scores under a model, given by their fingerprints."""
    return store / "references" / file_name(dataset) / f"{file_name(model)}-{precision}"


def file_name(fingerprint: str) -> str:
    """A fingerprint as the name of a folder."""
    return fingerprint.replace(":", "-")


def compute_reference(
    policy: Policy,
    dataset: Dataset,
    folder: Path,
    *,
    model: str,
    precision: str,
    layout: Layout,
    device: Device,
    world: World = ALONE,
    room: int | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> ReferenceScores:
    """Score every pair of a dataset, a shard at a time; the folder appears complete or not at all.

    A killed one goes on after the last shard that was scored; of two at once, the second waits and reads what the first
    made. `room` is the tokens of a pack; the longest pair's, but at least 4096, when not given.

    Raises:
        Stopped: `stop` said so on some rank, asked before every `GROUP` of pairs; whole shards are kept.
    """
    columns = dataset.columns()
    prompts = 1 if layout == "shared" else 2
    tokens = prompts * columns.prompt.astype(np.int64) + columns.chosen + columns.rejected
    room = max(room or 4096, int(tokens.max()))
    facts = {"format": FORMAT, "dataset": dataset.fingerprint, "model": model, "precision": precision, "layout": layout}
    facts |= {"room": room, "device": device.name, "torch": torch.__version__}
    partial = folder.parent / f".{folder.name}-partial"
    with ExitStack() as held:
        together(world, lambda: held.enter_context(_by_itself(folder)) if world.leads else None)
        done = world.told(together(world, lambda: _done(partial, folder, facts) if world.leads else []))
        finished = len(done)
        for number in np.unique(columns.shard).tolist():
            if number in done:
                continue
            own = np.flatnonzero(columns.shard == number)
            logps = score_pairs(
                policy,
                lambda i, own=own, shard=number: dataset.take(shard, int(columns.row[own[i]])),
                tokens[own].tolist(),
                room=room,
                layout=layout,
                precision=precision,
                device=device,
                world=world,
                progress=progress,
                stop=stop,
            )
            write = partial_of(_write_shard, partial, number, columns.row[own], logps, facts)
            together(world, lambda write=write: write() if world.leads else None)
            finished += 1
            log.info("scored shard %d of %s (%d done)", number, dataset.fingerprint, finished)
        together(world, lambda: _finish(partial, folder, facts) if world.leads else None)
    read = partial_of(open_reference, folder, dataset=dataset.fingerprint, model=model, precision=precision)
    found = together(world, read)
    assert found is not None
    return found


@torch.no_grad()
def score_pairs(
    policy: Policy,
    take: Callable[[int], TokenizedPair],
    tokens: Sequence[int],
    *,
    room: int,
    layout: Layout,
    precision: str,
    device: Device,
    world: World = ALONE,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Floats:
    """Log-probabilities of pairs 0..n-1, float32[n, 2] (chosen, rejected); `tokens` is what each takes in a pack.

    Data-parallel ranks take packs in turn, an empty one where they run out; every rank gets all scores.

    Raises:
        Stopped: as `compute_reference`.
    """
    ranks = world.topology.dp
    logps = np.full((len(tokens), 2), np.nan, np.float32)
    done = 0
    for start in range(0, len(tokens), GROUP):
        if any(world.gather(stop())):
            raise Stopped(f"told to stop with {done} of {len(tokens)} pairs of a shard scored")
        members = range(start, min(start + GROUP, len(tokens)))
        packs = pack(tokens, members, room)
        packs += [[] for _ in range(-len(packs) % ranks)]
        mine: list[tuple[list[int], Floats]] = []
        for places in packs[world.dp_rank :: ranks]:
            batch = together(world, lambda own=places: _batch([take(i) for i in own], layout, device, world))
            with device.autocast("bf16" if precision == "bf16" else "fp32"):
                sides = side_logps(policy, batch)
            mine.append((places, sides.reshape(-1, 2).float().cpu().numpy()))
            done += len(places) * ranks
            if progress:
                progress(min(done, len(tokens)), len(tokens))
        for theirs in world.gather(mine if world.team_rank == 0 else []):
            for places, found in theirs:
                logps[places] = found
    return logps


def _batch(pairs: Sequence[TokenizedPair], layout: Layout, device: Device, world: World) -> Batch:
    return batch_of(pairs, layout=layout, device=device.torch, world=world)[1]


def open_reference(folder: Path, *, dataset: str, model: str, precision: str) -> ReferenceScores | None:
    """The scores of a folder, or None where there are none.

    Raises:
        IdentityError: they are of another dataset, model or precision; names both.
        DatasetError: a file is missing or altered.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DatasetError(f"{folder}/manifest.json: is not JSON: {error}; remove the folder") from None
    for name, wanted in (("format", FORMAT), ("dataset", dataset), ("model", model), ("precision", precision)):
        if manifest.get(name) != wanted:
            raise IdentityError(
                f"reference scores {folder}: {name} is {manifest.get(name)!r}, but this run needs {wanted!r}; remove "
                "the folder, and they are computed anew"
            )
    tables = []
    for entry in manifest["files"]:
        path = folder / entry["file"]
        found = digest_of(path) if path.is_file() else "missing"
        if found != entry["digest"]:
            raise DatasetError(f"{path}: digest {found}, but its manifest says {entry['digest']}; remove the folder")
        with pa.memory_map(str(path)) as source:
            tables.append(pa.ipc.open_file(source).read_all())
    table = pa.concat_tables(tables)
    return ReferenceScores(
        dataset=dataset,
        model=model,
        precision=precision,
        key=_key(table["shard"].to_numpy(), table["row"].to_numpy()),
        chosen=table["chosen_logp"].to_numpy(),
        rejected=table["rejected_logp"].to_numpy(),
    )


def align(table: PairTable, scores: Mapping[str, ReferenceScores]) -> Floats:
    """Scores of a plan's pairs, float32[2, pairs], looked up by (dataset, shard, row).

    Raises:
        IdentityError: a pair has no score, or one that is not finite.
    """
    aligned = np.full((2, len(table)), np.nan, np.float32)
    for code, fingerprint in enumerate(table.datasets):
        own = np.flatnonzero(table.dataset == code)
        found, wanted = scores[fingerprint], _key(table.shard[own], table.row[own])
        at = np.searchsorted(found.key, wanted).clip(max=max(0, len(found.key) - 1))
        known = found.key[at] == wanted if len(found.key) else np.zeros(len(wanted), bool)
        aligned[0, own] = np.where(known, found.chosen[at], np.nan)
        aligned[1, own] = np.where(known, found.rejected[at], np.nan)
    missing = np.flatnonzero(~np.isfinite(aligned).all(0))
    if len(missing):
        i = missing[0]
        raise IdentityError(
            f"{len(missing)} pairs have no reference score, the first is dataset {table.datasets[table.dataset[i]]}, "
            f"shard {table.shard[i]}, row {table.row[i]}; remove the dataset's folder below references/, and they are "
            "computed anew"
        )
    return aligned


def _key(shard: npt.NDArray[np.int32], row: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    return (shard.astype(np.int64) << 32) | row.astype(np.int64)


@contextmanager
def _by_itself(folder: Path) -> Generator[None]:
    """Hold a folder that is being made; another process waits here until it is there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _done(partial: Path, folder: Path, facts: Mapping[str, Any]) -> list[int]:
    """Shards that were scored before; what was scored otherwise, or is not as it was written, goes."""
    if (folder / MANIFEST).exists():
        return [int(entry["shard"]) for entry in json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]]
    partial.mkdir(exist_ok=True)
    done: list[int] = []
    for path in sorted(partial.glob("*.json")):
        entry = json.loads(path.read_text(encoding="utf-8"))
        file = partial / entry["file"]
        if entry["facts"] == facts and file.is_file() and entry["digest"] == digest_of(file):
            done.append(entry["shard"])
        else:
            path.unlink()
    return done


def _write_shard(
    partial: Path, shard: int, row: npt.NDArray[np.int32], logps: Floats, facts: Mapping[str, Any]
) -> None:
    table = pa.table(
        {
            "shard": pa.array(np.full(len(row), shard), pa.int32()),
            "row": pa.array(row, pa.int32()),
            "chosen_logp": pa.array(logps[:, 0]),
            "rejected_logp": pa.array(logps[:, 1]),
        }
    )
    path = partial / f"scores-{shard:05}.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    entry = {"file": path.name, "shard": shard, "pairs": len(table), "digest": digest_of(path), "facts": dict(facts)}
    staged = path.with_suffix(".new")
    staged.write_text(json.dumps(entry), encoding="utf-8")
    staged.rename(path.with_suffix(".json"))


def _finish(partial: Path, folder: Path, facts: Mapping[str, Any]) -> None:
    """Make the scored shards the dataset's scores: the manifest, then the rename."""
    if (folder / MANIFEST).exists():
        return
    noted = sorted(partial.glob("*.json"))
    files = [json.loads(path.read_text(encoding="utf-8")) for path in noted]
    listed = [{name: entry[name] for name in ("file", "shard", "pairs", "digest")} for entry in files]
    manifest = {**facts, "pairs": sum(entry["pairs"] for entry in files), "files": listed}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    for path in noted:
        (folder / path.name).unlink()
