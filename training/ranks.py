"""Several processes for one run: `python -m training.ranks --config RUN.toml ...` starts `training.run` in each.

torchrun's agent, with three things settled for a run: the exit code is that of the rank that failed first (torchrun's
own is always 1), the last line says which rank that was and why, and ranks that are told to stop, or that have lost
another, have `save.grace_seconds` to end; and ranks whose agent is gone, even by SIGKILL, end as if told to stop. Over
several nodes the same command runs on each, with `--nodes` and one
`--rendezvous HOST:PORT`.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from training.config import load_run
from training.errors import ConfigError, PairLedgerError
from training.run import AGENT
from training.setup import check_degrees


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; gives its exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.ranks", description="Train one run in several processes.")
    parser.add_argument("--config", required=True, help="RUN.toml; its devices.processes is their number")
    parser.add_argument("--nodes", type=int, default=1, help="machines that share the processes evenly")
    parser.add_argument("--rendezvous", default="127.0.0.1:0", help="HOST:PORT where several nodes meet")
    asked, passed_on = parser.parse_known_args(arguments)
    try:
        config = load_run(asked.config)
        if config.model.path:
            check_degrees(config)
        processes = config.devices.processes
        if processes % asked.nodes:
            raise ConfigError(f"devices.processes = {processes} cannot be shared evenly by --nodes {asked.nodes}")
    except PairLedgerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    launch = LaunchConfig(
        min_nodes=asked.nodes,
        max_nodes=asked.nodes,
        nproc_per_node=processes // asked.nodes,
        rdzv_backend="c10d",
        rdzv_endpoint=asked.rendezvous,
        run_id="pairledger",
        max_restarts=0,
        monitor_interval=0.2,
        shutdown_timeout=config.save.grace_seconds,
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[AGENT] = str(os.getpid())
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what failed is said below, once
    command = ["-m", "training.run", "--config", asked.config, *passed_on]
    try:
        elastic_launch(launch, sys.executable)(*command)
    except ChildFailedError as failed:
        return _told(failed)
    except SignalException as caught:
        return 128 + caught.sigval
    return 0


def _told(failed: ChildFailedError) -> int:
    """Say which rank failed first, unless all refused the same in their own words, and give its exit code."""
    rank, failure = failed.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        print(f"error: rank {rank} was ended by {name}; the others were stopped", file=sys.stderr)
        return 128 - failure.exitcode
    if failure.exitcode == PairLedgerError.exit_code:
        print(f"error: rank {rank} failed first: {_cause(failure)}", file=sys.stderr)
    return failure.exitcode


def _cause(failure: ProcessFailure) -> str:
    """The sentence a rank left; without one, torchrun's own words."""
    left = failure.error_file_data.get("message")
    return str(left["message"]) if isinstance(left, dict) else failure.message


if __name__ == "__main__":
    sys.exit(main())
