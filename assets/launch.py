"""Starting the trainer: an interface, and its local end, a Pipes client that leaves nothing alive.

Why not `PipesSubprocessClient`: it signals its direct child only, so the ranks under a launcher stay when a run is
cancelled, and it takes exit code 0 for success although nothing was reported. Here

* the processes get a session and group of their own under `assets.guard`; whatever ends the wait (cancel, a crash
  of the step, a run worker that is gone) ends the group, first by SIGTERM, after a grace time by SIGKILL;
* rank 0 speaks Pipes, and a process that exits 0 without a report has failed;
* a failure carries the tail of the output and what was reported before it; only faults that another start may not meet
  (exit code 1, a signal) are retried, and a retry resumes, because the trainer does.

Costs one thread and a wake-up a second while the processes run.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import dagster as dg

from assets.reporting import portable
from training.config import DevicesConfig

POLL_SECONDS = 1.0
KILL_SECONDS = 5.0
MEANING = {
    2: "usage or configuration",
    3: "input refused",
    4: "identity mismatch",
    5: "no such device",
}
"""What the exit codes of `training.errors` say; none of these is mended by another try."""


class Accelerator(dg.ConfigurableResource):
    """What a run computes on: kind (auto, npu, gpu, cpu), how many devices, and how they divide the work."""

    kind: str = "auto"
    count: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ulysses: int = 1

    def devices(self, configured: DevicesConfig) -> DevicesConfig:
        """The `[devices]` section a run gets: this accelerator with the configured peak.

        Raises:
            pydantic.ValidationError: the degrees do not multiply to `count`.
        """
        return DevicesConfig(
            kind=self.kind,  # pyright: ignore[reportArgumentType]  (validated by the section)
            processes=self.count,
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            cp=self.cp,
            ulysses=self.ulysses,
            peak_flops=configured.peak_flops,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A module that runs in processes of its own and reports over Pipes; of several processes, the first one does."""

    module: str
    args: tuple[str, ...] = ()
    processes: int = 1
    extras: Mapping[str, Any] = field(default_factory=dict)

    def command(self) -> list[str]:
        """The module itself; a run of several processes through the agent that starts and ends them together."""
        module = "training.ranks" if self.processes > 1 else self.module
        return [sys.executable, "-m", module, *self.args]


class Launcher(Protocol):
    """Where programs run. `local` is below; a cluster's would take the same program."""

    def run(
        self, context: dg.AssetExecutionContext, program: Program, *, watch: Callable[[], None] | None = None
    ) -> Mapping[str, Any]:
        """Run to the end and return what rank 0 reported; `watch` is called while it runs.

        Raises:
            dagster.Failure: a non-zero exit, or exit 0 without a report.
        """
        ...


class LocalLauncher(dg.ConfigurableResource):
    """Processes on this machine: own session, TERM then KILL to the whole group, gone when the run worker is."""

    term_grace_s: float = 15.0
    tail_lines: int = 40

    def run(
        self, context: dg.AssetExecutionContext, program: Program, *, watch: Callable[[], None] | None = None
    ) -> Mapping[str, Any]:
        """See `Launcher.run`."""
        tail: deque[str] = deque(maxlen=self.tail_lines)
        with dg.open_pipes_session(
            context=context.op_execution_context,  # Pipes reads what the asset context has deprecated
            extras=dict(program.extras),
            context_injector=dg.PipesTempFileContextInjector(),
            message_reader=dg.PipesTempFileMessageReader(),
        ) as session:
            code = self._wait(context, program, session.get_bootstrap_env_vars(), tail, watch)
        reports = [message for message in session.get_custom_messages() if isinstance(message, Mapping)]
        reported = {key: value for report in reports for key, value in report.items()}
        if code == 0 and reported:
            return reported
        last = next((line.strip() for line in reversed(tail) if line.strip()), "it printed nothing")
        if code == 0:
            what = f"{program.module} exited 0 but reported no result, so nothing counts as made; last line: {last}"
        else:
            what = f"{program.module} exited {code} ({_meaning(code)}): {last}"
        raise dg.Failure(
            description=what,
            metadata={
                "exit_code": code,
                "output": dg.MetadataValue.md("```\n" + "".join(tail)[-8000:] + "\n```"),
                **{f"reported/{key}": value for key, value in portable(reported).items()},
            },
            allow_retries=code not in MEANING,
        )

    def _wait(
        self,
        context: dg.AssetExecutionContext,
        program: Program,
        pipes_env: Mapping[str, str],
        tail: deque[str],
        watch: Callable[[], None] | None,
    ) -> int:
        group = subprocess.Popen(
            [sys.executable, "-m", "assets.guard", str(os.getpid()), str(self.term_grace_s), *program.command()],
            env={**os.environ, **pipes_env, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        reader = threading.Thread(target=_pump, args=(group, tail), daemon=True)
        reader.start()
        worker = os.getppid()
        try:
            while True:
                try:
                    code = group.wait(POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    if os.getppid() != worker:
                        raise dg.Failure("the run worker is gone; the processes were stopped") from None
                    if watch:
                        watch()
        finally:
            # after a normal end as well: a rank may outlive the program that started it
            self._end(context, group)
            reader.join(KILL_SECONDS)
        if watch:
            watch()
        return code

    def _end(self, context: dg.AssetExecutionContext, group: subprocess.Popen[str]) -> None:
        """SIGTERM, the grace time, SIGKILL, each to the whole group; a second interrupt goes to SIGKILL at once."""
        if group.poll() is None:
            context.log.warning(f"stopping process group {group.pid}: SIGTERM, SIGKILL after {self.term_grace_s:g} s")
        try:
            if group.poll() is None:
                _signal(group, signal.SIGTERM, self.term_grace_s)
        finally:
            _signal(group, signal.SIGKILL, KILL_SECONDS)


def _signal(group: subprocess.Popen[str], number: signal.Signals, wait_s: float) -> None:
    end = time.monotonic() + wait_s
    try:
        os.killpg(group.pid, number)
        while time.monotonic() < end:
            group.poll()  # reaps the leader, so that an empty group is seen as one
            os.killpg(group.pid, 0)
            time.sleep(0.05)
    except ProcessLookupError:
        return


def _pump(group: subprocess.Popen[str], tail: deque[str]) -> None:
    assert group.stdout is not None
    with group.stdout as lines:
        for line in lines:
            tail.append(line)
            sys.stdout.write(line)
            sys.stdout.flush()


def _meaning(code: int) -> str:
    if code > 128:
        return f"killed by {signal.Signals(code - 128).name}"
    return MEANING.get(code, "failed")
