"""Reference scores: the log-probabilities of a dataset's pairs under a frozen model, computed once and read by all.

They lie in `references/DATASET/MODEL-PRECISION/`, one Arrow file a shard of the dataset and a manifest that is written
last. A run reads them where dataset, model and precision are its own, and refuses them by name where they are not; they
are never recomputed in silence while a run trains. Packs hold as many tokens as training's, so that a policy equal to
its reference starts at ln 2: exactly where the packs are the same, else to the rounding of the kernels (about 1e-6 a
token in fp32).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from blake3 import blake3

from training.data.packing import pack
from training.data.table import PairTable
from training.errors import DatasetError, IdentityError
from training.geometry import Layout
from training.model import Policy
from training.parallel.agree import together
from training.parallel.device import Device
from training.parallel.mesh import ALONE, World
from training.scores import Batch, batch_of, side_logps

if TYPE_CHECKING:
    from training.data.shards import Dataset
    from training.data.tokenize import TokenizedPair

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
) -> ReferenceScores:
    """Score every pair of a dataset; the rank that leads writes the folder, which appears complete or not at all.

    `room` is the tokens of a pack; the longest pair's, but at least 4096, when not given.
    """
    columns = dataset.columns()
    shard, row = columns.shard, columns.row
    prompts = 1 if layout == "shared" else 2
    tokens = (prompts * columns.prompt.astype(np.int64) + columns.chosen + columns.rejected).tolist()
    logps = score_pairs(
        policy,
        lambda i: dataset.take(int(shard[i]), int(row[i])),
        tokens,
        room=max(room or 4096, max(tokens)),
        layout=layout,
        precision=precision,
        device=device,
        world=world,
        progress=progress,
    )
    scores = ReferenceScores(
        dataset=dataset.fingerprint,
        model=model,
        precision=precision,
        key=_key(shard, row),
        chosen=logps[:, 0],
        rejected=logps[:, 1],
    )
    facts = {"device": device.name, "torch": torch.__version__, "layout": layout}
    together(world, lambda: _write(scores, folder, facts=facts) if world.leads else None)
    return scores


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
) -> Floats:
    """Log-probabilities of pairs 0..n-1, float32[n, 2] (chosen, rejected); `tokens` is what each takes in a pack.

    Data-parallel ranks take packs in turn, an empty one where they run out; every rank gets all scores.
    """
    ranks = world.topology.dp
    logps = np.full((len(tokens), 2), np.nan, np.float32)
    done = 0
    for start in range(0, len(tokens), GROUP):
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
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
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
        found = blake3(path.read_bytes()).hexdigest() if path.is_file() else "missing"
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


def _write(scores: ReferenceScores, folder: Path, facts: dict[str, str]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        files = [_write_shard(scores, int(shard), staging) for shard in np.unique(scores.key >> 32)]
        manifest = {
            "format": FORMAT,
            "dataset": scores.dataset,
            "model": scores.model,
            "precision": scores.precision,
            "pairs": len(scores.key),
            **facts,
            "files": files,
        }
        (staging / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if not (folder / "manifest.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            staging.rename(folder)  # two writers: the second finds the first one's manifest
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_shard(scores: ReferenceScores, shard: int, folder: Path) -> dict[str, object]:
    own = scores.key >> 32 == shard
    table = pa.table(
        {
            "shard": pa.array(np.full(own.sum(), shard), pa.int32()),
            "row": pa.array(scores.key[own] & 0xFFFFFFFF, pa.int32()),
            "chosen_logp": pa.array(scores.chosen[own]),
            "rejected_logp": pa.array(scores.rejected[own]),
        }
    )
    path = folder / f"scores-{shard:05}.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return {"file": path.name, "pairs": len(table), "digest": blake3(path.read_bytes()).hexdigest()}
