"""Checkpoints: distributed-checkpoint files for weights and moments, JSON for the rest, a manifest written last.

    checkpoints/step_8/  dcp/  state.json  manifest.json

A step without its manifest does not exist: a killed save is named, skipped and overwritten. The manifest holds every
file's digest, so that `dcp/` (whose own index is a pickle) is opened only after it proved to be what was written. It
also holds the run's identity by field, so that what would resume it can be compared before any weight is read. The
state dicts go through torch's distributed helpers: with the optimizer's own, a fresh optimizer has no moments to fill
and a load restores none, in silence.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import random
import shutil
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from training.data.fingerprint import differing
from training.errors import IdentityError, TrainingError
from training.parallel.agree import together
from training.parallel.mesh import ALONE, World

FORMAT = 2
log = logging.getLogger(__name__)

TRAINED = StateDictOptions(ignore_frozen_params=True)
"""A checkpoint holds what is trained: an adapter's base model lies where it was loaded from."""

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


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The complete checkpoint with the highest number, and sentences on later ones that are incomplete."""
    skipped: list[str] = []
    for step, path in sorted(_steps(folder), reverse=True):
        manifest = _manifest(path)
        if manifest is not None:
            return Checkpoint(folder=path, step=step, manifest=manifest), skipped
        skipped.append(f"{path} is incomplete (no manifest of format {FORMAT}) and is skipped")
    return None, skipped


def save(
    folder: Path,
    *,
    step: int,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    identity: Mapping[str, str],
    facts: Mapping[str, Any],
    keep: int,
    world: World = ALONE,
) -> Path:
    """Save a step and then remove all but the newest `keep`; every rank writes its own part, the first one the rest.

    `facts` (plan position, schedule, topology, parameter groups) stand in the manifest.

    Raises:
        TrainingError: a rank could not write, and why; the step does not exist then.
    """
    path = folder / f"step_{step}"
    together(world, lambda: _emptied(path) if world.leads else None)
    weights, moments = get_state_dict(module, optimizer, options=TRAINED)
    states = world.gather(_rng_state())
    together(world, lambda: _write(path, weights, moments, world))
    together(world, lambda: _commit(folder, path, step, identity, facts, states, keep) if world.leads else None)
    return path


def _emptied(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)  # only an incomplete one can be there: steps go up
    path.mkdir(parents=True)


def _write(path: Path, weights: dict[str, Any], moments: Any, world: World) -> None:
    with _one_process():
        save_state(
            {"model": weights, "optimizer": moments},
            checkpoint_id=path / "dcp",
            process_group=world.host,
            no_dist=world.size == 1,
        )


def _commit(
    folder: Path,
    path: Path,
    step: int,
    identity: Mapping[str, str],
    facts: Mapping[str, Any],
    states: Sequence[Mapping[str, Any]],
    keep: int,
) -> None:
    (path / "state.json").write_text(json.dumps({"rng": list(states)}) + "\n", encoding="utf-8")
    files = {str(f.relative_to(path)): _digest(f) for f in sorted(path.rglob("*")) if f.is_file()}
    manifest = {"format": FORMAT, "step": step, "identity": dict(identity), **facts, "files": files}
    staging = path / ".manifest.json"
    with staging.open("w", encoding="utf-8") as out:
        out.write(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        out.flush()
        os.fsync(out.fileno())
    staging.rename(path / "manifest.json")
    complete = [p for _, p in sorted(_steps(folder)) if _manifest(p) is not None]
    for old in complete[:-keep]:
        (old / "manifest.json").unlink()  # first: a removal that is cut short leaves an incomplete step
        shutil.rmtree(old)


def restore(
    checkpoint: Checkpoint, module: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World = ALONE
) -> None:
    """Put weights, moments and random states back, after every file's digest has been verified, on any topology.

    Random states are each rank's own where as many ranks saved them, else the first one's: nothing that a step computes
    draws from them.

    Raises:
        IdentityError: a file is missing or altered, by name.
        TrainingError: the files do not hold a tensor that the model or the optimizer has.
    """
    together(world, lambda: _verify(checkpoint, world))
    weights, moments = get_state_dict(module, optimizer, options=TRAINED)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    together(world, lambda: _read(checkpoint, state, world))
    set_state_dict(
        module,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=replace(TRAINED, strict=False),  # what is frozen is not there
    )
    saved = json.loads((checkpoint.folder / "state.json").read_text(encoding="utf-8"))["rng"]
    _set_rng_state(saved[world.rank] if len(saved) == world.size else saved[0])


def _verify(checkpoint: Checkpoint, world: World) -> None:
    """Each rank verifies its share of the files."""
    for name, digest in sorted(checkpoint.manifest["files"].items())[world.rank :: world.size]:
        file = checkpoint.folder / name
        found = _digest(file) if file.is_file() else "missing"
        if found != digest:
            raise IdentityError(
                f"{file}: digest {found}, but its manifest says {digest}; remove {checkpoint.folder} to resume from "
                "the checkpoint before it"
            )


def _read(checkpoint: Checkpoint, state: dict[str, Any], world: World) -> None:
    try:
        with _one_process():
            load_state(
                state,
                checkpoint_id=checkpoint.folder / "dcp",
                process_group=world.host,
                no_dist=world.size == 1,
            )
    except CheckpointException as error:
        causes = "; ".join(str(cause) for cause, _ in error.failures.values())
        raise TrainingError(f"{checkpoint.folder}: does not hold this model and optimizer: {causes}") from None


def _steps(folder: Path) -> list[tuple[int, Path]]:
    found = [(p.name.removeprefix("step_"), p) for p in folder.glob("step_*") if p.is_dir()]
    return [(int(number), path) for number, path in found if number.isdecimal()]


def _manifest(path: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if manifest.get("format") == FORMAT else None


def _digest(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _rng_state() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    devices = [_text(s) for s in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else []
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, [int(k) for k in keys], *rest],
        "torch": _text(torch.get_rng_state()),
        "devices": devices,
    }


def _set_rng_state(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(_bytes(state["torch"]))
    if len(state["devices"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_bytes(text) for text in state["devices"]])


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


@contextmanager
def _one_process() -> Generator[None]:
    """Saving without a process group is meant, not an oversight that needs a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
