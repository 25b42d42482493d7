"""One start of a run: lock its folder, load, resume, train, save, export, and say how it ended."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from training.checkpoint import Saver, restore
from training.config import ModelConfig, dump
from training.errors import Stopped, TrainingError
from training.evaluate import held_out_logps
from training.export import Lineage, export, whole_weights
from training.ledger.facts import AttemptFacts
from training.ledger.flops import model_shape
from training.ledger.record import StepRecord
from training.ledger.writer import Attempt, LedgerWriter, close_attempt, open_attempt
from training.loop import Progress, Work, train
from training.model import Policy, load_model
from training.parallel.agree import together
from training.parallel.device import Device
from training.parallel.mesh import ALONE, World
from training.receipt import Checkpoint
from training.reference import Floats, align, compute_reference, open_reference, place_of
from training.scores import open_policy
from training.setup import Prepared
from training.step import build_optimizer, parameter_groups

log = logging.getLogger("training")


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What an attempt came to: its number, the last step that is saved, and that step's record if it made one."""

    attempt: int
    step: int
    record: StepRecord | None


def attempt_run(
    run: Prepared,
    checkpoint: Checkpoint | None,
    device: Device,
    world: World,
    *,
    dagster_run_id: str | None,
    progress: Progress | None,
    stop: Callable[[], bool],
) -> Done:
    """Start or resume a run whose folder is owned; its record says `finished`, `stopped` or `failed` afterwards.

    The rank that leads makes the attempt and writes its ledger; all ranks train.
    """
    start = 1 if checkpoint is None else checkpoint.step + 1
    facts = AttemptFacts(
        dagster_run_id=dagster_run_id,
        from_step=start,
        started_at=datetime.now(UTC),
        device=f"{device.kind} ({device.name})",
        **world.topology.model_dump(),
        pack_tokens=run.pack_tokens,
        peak_flops=run.config.devices.peak_flops,
    )
    attempt, writer = together(world, lambda: _opened(run, facts) if world.leads else (None, None))
    number = world.told(attempt.number if attempt else 0)
    outcome = "failed"
    try:
        with ExitStack() as open_files:
            if attempt and writer:
                open_files.enter_context(logged(attempt.folder / "output.log"))
                open_files.enter_context(closing(writer))
            log.info(
                "%s, attempt %d: steps %d to %d on %s", run.run_id, number, start, run.total, _where(device, world)
            )
            try:
                work = _work(run, number, checkpoint, device, world, stop)
            except Stopped as stopped:
                outcome = "stopped"
                log.info("%s: %s", run.run_id, stopped)
                return Done(attempt=number, step=start - 1, record=None)
            saver = _saver(work, run)
            open_files.callback(saver.close)

            def keep(step: int, held_out_loss: float | None) -> None:
                if writer:
                    writer.flush()
                saver.begin(step, _facts(work, run, step, held_out_loss))

            step, record = train(
                work, start=start, writer=writer, save=keep, save_fault=saver.fault, stop=stop, progress=progress
            )
            saver.drain()
            if step >= run.total:
                export_run(
                    work.policy, run, step, run.run_dir / "export", dtype=run.config.save.export_dtype, world=world
                )
            outcome = "finished" if step >= run.total else "stopped"
            log.info("%s %s at step %d", run.run_id, outcome, step)
            return Done(attempt=number, step=step, record=record)
    finally:
        if attempt and writer:
            close_attempt(attempt, outcome=outcome, gaps=writer.gaps)


def _opened(run: Prepared, facts: AttemptFacts) -> tuple[Attempt, LedgerWriter]:
    attempt = open_attempt(run.run_dir, config_toml=dump(run.config), facts=facts)
    return attempt, LedgerWriter(attempt.steps)


def _where(device: Device, world: World) -> str:
    degrees = ", ".join(f"{name} {size}" for name, size in world.topology.model_dump().items() if size > 1)
    return f"{world.size} x {device.name} ({degrees})" if degrees else device.name


def _work(
    run: Prepared,
    attempt: int,
    checkpoint: Checkpoint | None,
    device: Device,
    world: World,
    stop: Callable[[], bool],
) -> Work:
    """Load, prove and score the base model, then put the checkpoint's state over it."""
    model, live = run.config.model, run.config.objective.reference == "live"
    policy = open_policy(model, device, world, run.config.plan.seed)
    for note in policy.notes:
        log.info("%s", note)
    frozen = frozen_policy(policy, model, device, world) if live and run.config.objective.reads_reference else None
    # of the base model: before a checkpoint takes its place
    reference = (
        references(run, policy, device, world, stop) if frozen is None else _judged_by(frozen, run, device, world)
    )
    optimizer = build_optimizer(policy.module, run.config.optimizer)
    if checkpoint is not None:
        restore(checkpoint, policy.module, optimizer, world)
        log.info("resumed from %s", checkpoint.folder)
    return Work(
        config=run.config,
        run_id=run.run_id,
        attempt=attempt,
        plan=run.plan,
        datasets=run.datasets,
        policy=policy,
        frozen=frozen,
        optimizer=optimizer,
        device=device,
        world=world,
        reference=reference,
        pack_tokens=run.pack_tokens,
        shape=model_shape(policy.module.config.to_dict()),
    )


def frozen_policy(policy: Policy, model: ModelConfig, device: Device, world: World) -> Policy:
    """The live reference: the policy without its adapter, else a second model."""
    if model.lora is not None:
        return policy.without_adapter()
    frozen = load_model(model, device, world)
    frozen.module.requires_grad_(False)
    return frozen


def _judged_by(frozen: Policy, run: Prepared, device: Device, world: World) -> Floats:
    """What a live reference says of held-out pairs, float32[2, pairs of the table], 0 for the others."""
    reference = np.zeros((2, len(run.plan.table)), np.float32)
    if run.config.save.validate_steps:
        reference[:, run.plan.held_out] = held_out_logps(
            frozen,
            run.plan,
            run.datasets,
            layout=run.config.plan.layout,
            precision=run.config.model.dtype,
            device=device,
            room=run.pack_tokens,
            world=world,
        ).T
    return reference


def references(
    run: Prepared, policy: Policy, device: Device, world: World = ALONE, stop: Callable[[], bool] = lambda: False
) -> Floats:
    """Reference log-probs of the plan's pairs, float32[2, pairs]: read, computed where missing, 0 where none are.

    Raises:
        Stopped: `stop` said so while they were computed.
    """
    config = run.config
    if not config.objective.reads_reference:
        return np.zeros((2, len(run.plan.table)), np.float32)
    model, precision = run.identity["reference"], config.model.dtype
    scores = {}
    for name, dataset in run.datasets.items():
        folder = place_of(run.store, name, model, precision)
        there = partial(open_reference, folder, dataset=name, model=model, precision=precision)
        found = together(world, there)
        if any(scores is None for scores in world.gather(found and found.dataset)):
            log.info("scoring dataset %s with the reference %s", name, model)
            found = compute_reference(
                policy,
                dataset,
                folder,
                model=model,
                precision=precision,
                layout=config.plan.layout,
                device=device,
                world=world,
                room=run.pack_tokens,
                stop=stop,
            )
        assert found is not None
        scores[name] = found
    return together(world, lambda: align(run.plan.table, scores))


def _saver(work: Work, run: Prepared) -> Saver:
    return Saver(
        folder=run.run_dir / "checkpoints",
        module=work.policy.module,
        optimizer=work.optimizer,
        identity=run.identity,
        config=run.config.save,
        world=work.world,
    )


def _facts(work: Work, run: Prepared, step: int, held_out_loss: float | None) -> dict[str, Any]:
    """What stands in a step's manifest beside its files."""
    return {
        "run_id": run.run_id,
        "fingerprint": run.fingerprint,
        "position": {"plan": run.plan.fingerprint, "epoch": run.plan.epoch_of(step), "step": step},
        "total_steps": run.total,
        "topology": work.world.topology.model_dump(),
        "ledger": {"attempt": work.attempt, "step": step},
        "parameter_groups": parameter_groups(work.policy.module),
        "held_out_loss": held_out_loss,
    }


def export_run(policy: Policy, run: Prepared, steps: int, folder: Path, *, dtype: str, world: World = ALONE) -> None:
    """Export a policy as the run left it after so many steps, with the run's lineage."""
    table = run.plan.table
    shown = np.concatenate([run.plan.pairs_of(step) for step in range(1, steps + 1)])
    counted = np.bincount(table.source[shown], minlength=len(table.sources))
    supervised = table.chosen_loss.astype(np.int64) + table.rejected_loss
    lineage = Lineage(
        run_id=run.run_id,
        base=run.config.model.path,
        identity=run.identity,
        steps=steps,
        pairs_by_source={name: int(n) for name, n in zip(table.sources, counted, strict=True) if n},
        tokens={
            "source tokens": int(table.tokens(run.config.plan.layout)[shown].sum()),
            "supervised tokens": int(supervised[shown].sum()),
        },
        objective=run.config.objective.model_dump(),
    )
    base = Path(run.config.model.path)
    tokenizer = Path(next(iter(run.datasets.values())).manifest.tokenizer_path)
    write = partial(
        export,
        whole_weights(policy),
        folder,
        source=base,
        tokenizer=tokenizer if tokenizer.is_dir() else base,
        dtype=dtype,
        lineage=lineage,
        lora=run.config.model.lora,
    )
    together(world, lambda: write() if world.leads else None)


@contextmanager
def owned(run_dir: Path) -> Generator[None]:
    """Hold a run folder; the lock is the operating system's and goes with the process, however it ends.

    Raises:
        TrainingError: another process holds it; names that process.
    """
    with (run_dir / "lock").open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            raise TrainingError(f"{run_dir} is in use by {owner}; wait for it, or end it") from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        yield


@contextmanager
def logged(path: Path) -> Generator[None]:
    """Keep what this run logs in a file as well."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        handler.close()
