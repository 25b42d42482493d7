"""The demonstration's Dagster runs: the project's own jobs, in this process, on the instance that the UI shows.

In this process, because a worker for each run and a process for each step would take longer than the work. What the
runs print goes to a file. A demonstration that was killed leaves its last run as started: the next one ends it.
"""

import os
import socket
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg

from training.errors import TrainingError

TAG = "pairledger/demo"
"""Tag of the runs; its value is the process that made them."""
QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
BUSY_SECONDS = 40.0
"""How long a run folder may still belong to processes of a killed demonstration: their grace time, and some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where jobs run, and what became of them."""

    definitions: dg.Definitions
    instance: dg.DagsterInstance
    log: Path
    runs: list[str] = field(default_factory=list)

    def run(self, job: str, partition: str | None = None) -> dg.ExecuteInProcessResult:
        """Run one job to its end.

        Raises:
            TrainingError: it failed; says which step and why.
        """
        patience = time.monotonic() + BUSY_SECONDS
        while True:
            with self.log.open("a", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
                result = self.definitions.resolve_job_def(job).execute_in_process(
                    instance=self.instance,
                    partition_key=partition,
                    run_config=QUIET,
                    tags={TAG: process(os.getpid())},
                    raise_on_error=False,
                )
            self.runs.append(result.run_id)
            if result.success:
                return result
            why = reason(result)
            if "DagsterExecutionInterruptedError" in why:
                raise KeyboardInterrupt
            if "is in use by" not in why or time.monotonic() > patience:
                raise TrainingError(f"Dagster run {result.run_id} of {job} failed: {why} (output: {self.log})")
            time.sleep(2)


def metadata(result: dg.ExecuteInProcessResult, asset: str) -> dict[str, Any]:
    """What a job's run said of one asset."""
    event = result.asset_materializations_for_node(asset)[-1]
    return {name: value.value for name, value in event.metadata.items()}


def reason(result: dg.ExecuteInProcessResult) -> str:
    """The first failed step and what it said."""
    for event in result.all_events:
        if event.is_step_failure:
            said = event.step_failure_data
            failure = said.user_failure_data
            error = failure.description if failure else said.error and said.error.message
            return f"{event.step_key}: {str(error).strip()}"
    checks = [event for event in result.all_events if event.is_failure]
    return str(checks[0].message) if checks else "it did not say why"


def process(number: int) -> str:
    """A process of this machine, as a tag."""
    return f"{number}@{socket.gethostname()}"


def end_abandoned(instance: dg.DagsterInstance) -> int:
    """Mark runs of demonstrations that are no more as failed, and free what ended runs hold of the pools.

    The daemon would free it, but need not run; a job waits for a held pool for ever. Gives how many runs were marked.
    """
    going = dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.STARTING])
    abandoned = [run for run in instance.get_runs(going) if TAG in run.tags and not _lives(run.tags[TAG])]
    for run in abandoned:
        instance.report_run_failed(run, "the demonstration that made this run was ended from outside")
    for run_id in instance.event_log_storage.get_concurrency_run_ids():
        run = instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            instance.event_log_storage.free_concurrency_slots_for_run(run_id)
    return len(abandoned)


def _lives(tag: str) -> bool:
    number, _, host = tag.partition("@")
    if host != socket.gethostname():
        return True
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
