"""Checkpoints: distributed-checkpoint files for weights and moments, JSON for the rest, a manifest written last.

A save copies this rank's state to the host and returns; a thread writes it while training goes on, over a process group
of its own, and the rank that leads commits it once every rank has written. What fails on one rank fails on all, when
they next ask. `dcp/`, whose own index is a pickle, is opened only after every file proved to be what was written. The
state dicts go through torch's distributed helpers: with the optimizer's own, a fresh optimizer has no moments to fill
and a load restores none, in silence.
"""

from __future__ import annotations

import base64
import json
import logging
import random
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from training.config import SaveConfig
from training.errors import PairLedgerError, TrainingError
from training.parallel.agree import attempted, raise_first, together
from training.parallel.fsdp import local
from training.parallel.mesh import ALONE, World
from training.receipt import Checkpoint, altered, check_space, commit, retain

log = logging.getLogger("training")

TRAINED = StateDictOptions(ignore_frozen_params=True)
"""A checkpoint holds what is trained: an adapter's base model lies where it was loaded from."""

# one process saving by itself is meant, not an oversight that needs a warning
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@dataclass(slots=True, kw_only=True, eq=False)
class Saver:
    """Saves the steps of one attempt, at most one at a time in the background.

    `facts` gives what stands in a step's manifest beside its files: plan position, schedule, topology.
    """

    folder: Path
    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    identity: Mapping[str, str]
    config: SaveConfig
    world: World = ALONE
    _thread: ThreadPoolExecutor | None = None
    _writing: Future[None] | None = None

    def begin(self, step: int, facts: Mapping[str, Any]) -> None:
        """Copy the state and go on; an earlier save is waited for first.

        Raises:
            TrainingError: a save failed on some rank, this one for want of space or an earlier one, and why.
        """
        self.drain()
        path, world = self.folder / f"step_{step}", self.world
        weights, moments = get_state_dict(self.module, self.optimizer, options=TRAINED)
        state = {"model": weights, "optimizer": moments}
        needed = sum(world.gather(_bytes_of(state)))
        together(world, lambda: _emptied(path, needed) if world.leads else None)
        states = world.gather(_rng_state())
        staged: Any = DefaultStager(StagingOptions(False, False, False, False)).stage(state)
        finish: Callable[[], None] | None = None
        if world.leads:
            finish = partial(self._commit, path, step, facts, states)
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="save")
        self._writing = self._thread.submit(_write, path, staged, world, finish)

    def fault(self) -> PairLedgerError | None:
        """What a background save that has ended met; asks without waiting, and tells it once."""
        if self._writing is None or not self._writing.done():
            return None
        return self._ended()

    def drain(self) -> None:
        """Wait for the save in the background.

        Raises:
            TrainingError: it failed on some rank; the step does not exist.
        """
        if self.world.size == 1:
            raise_first([self._ended()])
        else:
            raise_first(self.world.gather(self._ended()))

    def close(self) -> None:
        """Wait for the thread, whatever came of its work."""
        if self._thread is not None:
            self._thread.shutdown()

    def _ended(self) -> PairLedgerError | None:
        writing, self._writing = self._writing, None
        return None if writing is None else attempted(writing.result)[1]

    def _commit(self, path: Path, step: int, facts: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> None:
        (path / "state.json").write_text(json.dumps({"rng": list(states)}) + "\n", encoding="utf-8")
        commit(path, step=step, identity=self.identity, facts=facts)
        retain(self.folder, keep=self.config.keep, every=self.config.every)


def _write(path: Path, state: dict[str, Any], world: World, finish: Callable[[], None] | None) -> None:
    try:
        save_state(state, checkpoint_id=path / "dcp", process_group=world.saving, no_dist=world.size == 1)
        if finish:
            finish()
    except CheckpointException as error:
        raise TrainingError(f"{path}: could not be saved: {_causes(error)}") from None
    except OSError as error:
        raise TrainingError(f"{path}: could not be saved: {error}") from None


def _causes(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())


def _emptied(path: Path, needed: int) -> None:
    shutil.rmtree(path, ignore_errors=True)  # only an incomplete one can be there: steps go up
    path.mkdir(parents=True)
    check_space(path, needed)


def _bytes_of(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return local(state).nbytes
    return sum(map(_bytes_of, state.values())) if isinstance(state, dict) else 0


def verified(found: Sequence[Checkpoint], world: World) -> Checkpoint | None:
    """The first of these checkpoints whose files are all as written; each rank reads its share of them."""
    for checkpoint in found:
        names = sorted(checkpoint.manifest["files"])[world.rank :: world.size]
        wrong = [sentence for sentence in world.gather(altered(checkpoint, names)) if sentence]
        if not wrong:
            return checkpoint
        log.warning("%s; %s is skipped", wrong[0], checkpoint.folder)
    return None


def restore(
    checkpoint: Checkpoint,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World = ALONE,
) -> None:
    """Put weights, moments and random states of a verified checkpoint back, on any topology.

    Random states are each rank's own where as many ranks saved them, else the first one's: nothing that a step computes
    draws from them.

    Raises:
        TrainingError: the files do not hold a tensor that the model or the optimizer has.
    """
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


def restore_weights(checkpoint: Checkpoint, module: torch.nn.Module) -> None:
    """Put only the weights of a verified checkpoint into a model, in one process.

    Raises:
        TrainingError: as `restore`.
    """
    state: dict[str, Any] = {"model": get_model_state_dict(module, options=TRAINED)}
    _read(checkpoint, state, ALONE)
    set_model_state_dict(module, state["model"], options=replace(TRAINED, strict=False))


def _read(checkpoint: Checkpoint, state: dict[str, Any], world: World) -> None:
    try:
        load_state(state, checkpoint_id=checkpoint.folder / "dcp", process_group=world.host, no_dist=world.size == 1)
    except CheckpointException as error:
        causes = _causes(error)
        raise TrainingError(f"{checkpoint.folder}: does not hold this model and optimizer: {causes}") from None


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
