"""A run: `python -m training.run --config RUN.toml --store DIR [--partition P]`.

A run is its identity: the plan, the model, the reference and the recipes of objective and optimizer. Starting it again
continues where its newest complete checkpoint is, whoever starts it; starting a finished one does nothing. Everything
it writes lies in `runs/RUN_ID/`, which one process at a time may own.

Exit codes are those of `training.errors`, 128 + n for signal n: SIGTERM and SIGINT end a run after its current step,
with a checkpoint. So does the end of the agent that started this process as one of several ranks.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from training.attempt import attempt_run, owned
from training.checkpoint import verified
from training.config import RunConfig, load_run, store_root
from training.errors import IdentityError, PairLedgerError, TrainingError
from training.ledger.record import StepRecord
from training.loop import Progress, metrics
from training.parallel.agree import same, together
from training.parallel.device import pick
from training.parallel.mesh import World, world_of
from training.receipt import Checkpoint, check_identity, complete, open_checkpoint
from training.setup import Prepared, describe, prepare

log = logging.getLogger("training")

ECHO_SECONDS = 5.0
"""How long a rank whose peer is gone waits to be stopped, so that the peer is the one that is seen to have failed."""

AGENT = "PAIRLEDGER_AGENT"
"""Environment variable: the process id of the agent that started this rank, which outlives it or is missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run stands: the last step that is saved, and the folder of the exported model once it is finished.

    `metrics` are those of the attempt's last step; empty when it had nothing to do.
    """

    run_id: str
    run_dir: Path
    attempt: int | None
    steps: int
    finished: bool
    export: Path | None
    metrics: Mapping[str, float]


def run_training(
    config: RunConfig,
    store: Path,
    *,
    partition: str | None = None,
    resume: str = "auto",
    dagster_run_id: str | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> RunResult:
    """Train, or continue, or find the run finished.

    `resume` is `auto` (the newest checkpoint whose files are whole), the folder of one, or `never`.

    Raises:
        PairLedgerError: what `training.errors` holds; nothing is taken from the run folder's earlier state then.
    """
    device = pick(config.devices.kind, int(os.environ.get("LOCAL_RANK", "0")))
    with ExitStack() as held:
        world = held.enter_context(world_of(config.devices.topology, device))
        run = together(world, lambda: prepare(config, store, partition))
        same(world, run.identity)
        together(world, lambda: held.enter_context(_owned(run)) if world.leads else None)
        checkpoint = _chosen(run, resume, world)
        exported = world.told((run.run_dir / "export").is_dir())
        if checkpoint is not None and checkpoint.step >= run.total and exported:
            log.info("%s is finished at step %d; nothing to do", run.run_id, checkpoint.step)
            return _result(run, None, checkpoint.step, None)
        together(world, lambda: describe(run, partition) if world.leads else None)
        done = attempt_run(run, checkpoint, device, world, dagster_run_id=dagster_run_id, progress=progress, stop=stop)
        return _result(run, done.attempt, done.step, done.record)


def _owned(run: Prepared) -> AbstractContextManager[None]:
    run.run_dir.mkdir(parents=True, exist_ok=True)
    return owned(run.run_dir)


def _candidates(run: Prepared, resume: str) -> list[Checkpoint]:
    """The checkpoints that this start may go on from, newest first.

    Raises:
        IdentityError: what is there, or was named, is another run's or no checkpoint.
        TrainingError: the run folder holds what this start would write over.
    """
    folder = run.run_dir / "checkpoints"
    found, skipped = complete(folder)
    for sentence in skipped:
        log.warning("%s", sentence)
    if resume == "never" and found:
        raise TrainingError(
            f"{run.run_dir}: has checkpoints up to step {found[0].step}, which --resume never would write over; remove "
            "the folder to start anew, or resume"
        )
    if resume not in ("auto", "never"):
        named = open_checkpoint(Path(resume))
        if found and found[0].step > named.step:
            raise TrainingError(
                f"{run.run_dir}: has a checkpoint of step {found[0].step}, later than step {named.step} of {resume}; "
                "remove the later ones to go back, or start another run from it with --fork"
            )
        found = [named]
    for checkpoint in found[:1]:
        check_identity(checkpoint, run.identity)
    return found


def _chosen(run: Prepared, resume: str, world: World) -> Checkpoint | None:
    """The checkpoint to go on from, the same on every rank and with all its files as they were written.

    Raises:
        IdentityError: as `_candidates`, or there are checkpoints and none of them is whole.
    """
    found = world.told(together(world, lambda: _candidates(run, resume) if world.leads else []))
    checkpoint = verified(found, world)
    if found and checkpoint is None:
        names = ", ".join(str(c.folder) for c in found)
        raise IdentityError(f"{names}: altered since they were saved; remove them to start anew, or name another")
    return checkpoint


def _result(run: Prepared, attempt: int | None, steps: int, record: StepRecord | None) -> RunResult:
    exported = run.run_dir / "export"
    finished = steps >= run.total
    return RunResult(
        run_id=run.run_id,
        run_dir=run.run_dir,
        attempt=attempt,
        steps=steps,
        finished=finished,
        export=exported if finished else None,
        metrics={} if record is None else metrics(record),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; gives its exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.run", description="Train one run, or continue it.")
    parser.add_argument("--config", required=True, help="RUN.toml")
    parser.add_argument("--store", help="folder that holds runs/, references/ and plans/")
    parser.add_argument("--partition", help="name of the partition this run belongs to")
    parser.add_argument("--resume", default="auto", help="auto, never, or the folder of a checkpoint")
    asked = parser.parse_args(arguments)
    rank = int(os.environ.get("RANK", "0"))
    heading = f"rank {rank}: " if rank else ""
    level = logging.WARNING if rank else logging.INFO  # the first rank speaks for all
    logging.basicConfig(level=level, format=f"{heading}%(message)s", stream=sys.stdout)
    caught: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: caught.append(n))
    try:
        with reporting() as (report, dagster_run_id):
            result = run_training(
                load_run(asked.config),
                store_root(asked.store),
                partition=asked.partition,
                resume=asked.resume,
                dagster_run_id=dagster_run_id,
                stop=lambda: bool(caught) or _orphaned(caught),
            )
            report(
                {
                    "run_id": result.run_id,
                    "steps": result.steps,
                    "finished": result.finished,
                    "export": str(result.export) if result.export else None,
                    **result.metrics,
                }
            )
    except PairLedgerError as error:
        if not rank:
            print(f"error: {error}", file=sys.stderr)
        _remember(error)
        return error.exit_code
    except Exception as error:
        if "gloo" in str(error).lower() or isinstance(error, DistError):
            log.error("lost the other ranks: %s", str(error).partition("\n")[0])
            time.sleep(ECHO_SECONDS)
        else:
            log.exception("%s", type(error).__name__)
        _remember(error)
        return 1
    if caught and not result.finished:
        return 128 + caught[0]
    return 0


def _orphaned(caught: list[int]) -> bool:
    """Whether the agent is gone, who would have ended this rank; counts as a SIGTERM."""
    if os.environ.get(AGENT, str(os.getppid())) == str(os.getppid()):
        return False
    log.warning("the process that started this rank is gone; stopping")
    caught.append(signal.SIGTERM)
    return True


def _remember(error: Exception) -> None:
    """Leave the cause where the agent that started this rank looks for it."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        get_error_handler().record_exception(error)


@contextmanager
def reporting() -> Generator[tuple[Callable[[Mapping[str, Any]], None], str | None]]:
    """What to report the result to, and the Dagster run that started this process, if one did."""
    if int(os.environ.get("RANK", "0")):
        yield lambda result: None, None
        return
    if "DAGSTER_PIPES_CONTEXT" not in os.environ:
        yield lambda result: print(json.dumps(result)), None
        return
    from dagster_pipes import open_dagster_pipes

    with open_dagster_pipes() as pipes:
        yield pipes.report_custom_message, pipes.run_id


if __name__ == "__main__":
    sys.exit(main())
