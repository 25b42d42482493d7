"""A run: `python -m training.run --config RUN.toml --store DIR [--partition P]`.

A run is its identity: the plan, the model, the reference and the recipes of objective and optimizer. Starting it again
continues where its newest complete checkpoint is, whoever starts it; starting a finished one does nothing. Everything
it writes lies in `runs/RUN_ID/`, which one process at a time may own.

Exit codes are those of `training.errors`, 128 + n for signal n: SIGTERM and SIGINT end a run after its current step,
with a checkpoint.
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
from training.checkpoint import Checkpoint, check_identity, newest
from training.config import RunConfig, load_run, store_root
from training.errors import PairLedgerError
from training.ledger.record import StepRecord
from training.loop import Progress, metrics
from training.parallel.agree import same, together
from training.parallel.device import pick
from training.parallel.mesh import world_of
from training.setup import Prepared, describe, prepare

log = logging.getLogger("training")

ECHO_SECONDS = 5.0
"""How long a rank whose peer is gone waits to be stopped, so that the peer is the one that is seen to have failed."""


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
    dagster_run_id: str | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> RunResult:
    """Train, or continue, or find the run finished.

    Raises:
        PairLedgerError: what `training.errors` holds; nothing is taken from the run folder's earlier state then.
    """
    device = pick(config.devices.kind, int(os.environ.get("LOCAL_RANK", "0")))
    with ExitStack() as held:
        world = held.enter_context(world_of(config.devices.topology, device))
        run = together(world, lambda: prepare(config, store, partition))
        same(world, run.identity)
        together(world, lambda: held.enter_context(_owned(run)) if world.leads else None)
        checkpoint, finished = world.told(together(world, lambda: _standing(run) if world.leads else (None, False)))
        if checkpoint is not None and finished:
            log.info("%s is finished at step %d; nothing to do", run.run_id, checkpoint.step)
            return _result(run, None, checkpoint.step, None)
        together(world, lambda: describe(run, partition) if world.leads else None)
        done = attempt_run(run, checkpoint, device, world, dagster_run_id=dagster_run_id, progress=progress, stop=stop)
        return _result(run, done.attempt, done.step, done.record)


def _owned(run: Prepared) -> AbstractContextManager[None]:
    run.run_dir.mkdir(parents=True, exist_ok=True)
    return owned(run.run_dir)


def _standing(run: Prepared) -> tuple[Checkpoint | None, bool]:
    """The checkpoint to go on from, and whether nothing is left to do.

    Raises:
        IdentityError: it is another run's.
    """
    checkpoint, skipped = newest(run.run_dir / "checkpoints")
    for sentence in skipped:
        log.warning("%s", sentence)
    if checkpoint is None:
        return None, False
    check_identity(checkpoint, run.identity)
    return checkpoint, checkpoint.step >= run.total and (run.run_dir / "export").is_dir()


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
                dagster_run_id=dagster_run_id,
                stop=lambda: bool(caught),
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
