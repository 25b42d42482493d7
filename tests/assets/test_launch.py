"""Launched processes: what they report, how they fail, and that nothing outlives a cancelled or killed run."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pydantic
import pytest

from assets.launch import Accelerator, LocalLauncher, Program
from training.config import DevicesConfig

PROGRAMS = {
    "good": """
        from dagster_pipes import open_dagster_pipes
        with open_dagster_pipes() as pipes:
            print("working on", pipes.get_extra("step"))
            pipes.report_custom_message({"run_id": "run-1", "rows": 1})
            pipes.report_custom_message({"rows": 2})
    """,
    "silent": "print('I did it')",
    "killed": """
        import os
        from dagster_pipes import open_dagster_pipes
        pipes = open_dagster_pipes()
        pipes.report_custom_message({"rows": 1})
        os.kill(os.getpid(), 9)
    """,
    "refused": "import sys; print('pairs.jsonl:3: no rejected side', file=sys.stderr); sys.exit(3)",
    "stubborn": """
        import os, pathlib, subprocess, sys, time
        deaf = "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (2, 15)]; "
        code = deaf + "print('up', flush=True); time.sleep(600)"
        ranks = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
        [rank.stdout.readline() for rank in ranks]
        there = pathlib.Path(sys.argv[1])
        there.with_suffix(".new").write_text(" ".join(str(p) for p in (os.getpid(), *(r.pid for r in ranks))))
        there.with_suffix(".new").rename(there)
        time.sleep(600 if len(sys.argv) < 3 else 0)
    """,
}
RUN = """
    import os, sys
    import dagster as dg
    from dagster._utils.interrupts import setup_interrupt_handlers
    from assets.launch import LocalLauncher, Program

    @dg.asset
    def trained(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        launcher = LocalLauncher(term_grace_s=0.5)
        return dg.MaterializeResult(metadata=launcher.run(context, Program(module="stubborn", args=(sys.argv[1],))))

    setup_interrupt_handlers()  # as a run worker does
    dg.materialize([trained])
"""


@pytest.fixture(autouse=True)
def programs(tmp_path, monkeypatch):
    for name, text in {**PROGRAMS, "worker": RUN}.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def launch(program: Program, watch: Callable[[], None] | None = None) -> dg.ExecuteInProcessResult:
    @dg.asset
    def trained(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        return dg.MaterializeResult(metadata=LocalLauncher(term_grace_s=0.5).run(context, program, watch=watch))

    return dg.materialize([trained], raise_on_error=False)


def failure(result: dg.ExecuteInProcessResult) -> dg.Failure:
    assert not result.success
    assert result.asset_materializations_for_node("trained") == []
    data = result.failure_data_for_node("trained")
    assert data is not None and data.user_failure_data is not None
    user = data.user_failure_data
    return dg.Failure(description=user.description, metadata=user.metadata)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a zombie holds nothing; who adopted it reaps it


def until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.05)
    return False


def test_what_rank_0_reported_comes_back(capfd):
    result = launch(Program(module="good", extras={"step": 7}))
    assert result.success
    (made,) = result.asset_materializations_for_node("trained")
    assert {key: value.value for key, value in made.metadata.items()} == {"run_id": "run-1", "rows": 2}
    assert "working on 7" in capfd.readouterr().out


def test_exit_0_without_a_report_is_a_failure_case_silent_success():
    found = failure(launch(Program(module="silent")))
    assert found.description == (
        "silent exited 0 but reported no result, so nothing counts as made; last line: I did it"
    )


def test_what_was_reported_before_a_kill_is_kept_case_silent_success():
    found = failure(launch(Program(module="killed")))
    assert found.description is not None and found.description.startswith("killed exited 137 (killed by SIGKILL)")
    assert found.metadata["reported/rows"].value == 1
    assert found.metadata["exit_code"].value == 137


def test_a_failure_shows_the_end_of_the_output_and_its_meaning():
    found = failure(launch(Program(module="refused")))
    assert found.description == "refused exited 3 (input refused): pairs.jsonl:3: no rejected side"
    assert "pairs.jsonl:3: no rejected side" in str(found.metadata["output"].value)


@pytest.mark.parametrize(("module", "starts"), [("refused", 1), ("killed", 2)])
def test_only_faults_that_another_start_may_not_meet_are_retried(module, starts):
    seen = []

    @dg.asset(retry_policy=dg.RetryPolicy(max_retries=1))
    def trained(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        seen.append(context.retry_number)
        return dg.MaterializeResult(metadata=LocalLauncher().run(context, Program(module=module)))

    assert not dg.materialize([trained], raise_on_error=False).success
    assert seen == list(range(starts))


def test_a_rank_that_outlives_its_program_is_ended(tmp_path):
    failure(launch(Program(module="stubborn", args=(str(tmp_path / "pids"), "leave"))))
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    assert until(lambda: not any(map(alive, pids)))


def test_an_error_while_watching_ends_the_group(tmp_path):
    def watch() -> None:
        if (tmp_path / "pids").exists():
            raise RuntimeError("the watcher broke")

    result = launch(Program(module="stubborn", args=(str(tmp_path / "pids"),)), watch)
    assert not result.success
    assert not any(alive(int(pid)) for pid in (tmp_path / "pids").read_text().split())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_a_run_case_cancel_leaves_children(tmp_path, number):
    """The ranks ignore SIGINT and SIGTERM. SIGKILL hits the run worker itself, which can do nothing any more."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(tmp_path / "worker.py"), str(tmp_path / "pids")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as worker:
        assert until((tmp_path / "pids").exists, 60)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        guard = int(Path(f"/proc/{pids[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
        assert all(map(alive, [guard, *pids]))
        os.kill(worker.pid, number)
        assert worker.wait(30) != 0
        assert until(lambda: not any(map(alive, [guard, *pids])))


def test_more_processes_go_through_the_agent():
    command = Program(module="training.run", args=("--x",), processes=4).command()
    assert command == [sys.executable, "-m", "training.ranks", "--x"]
    assert Program(module="training.run").command() == [sys.executable, "-m", "training.run"]


def test_accelerator_becomes_the_devices_section():
    assert Accelerator(kind="cpu").devices(DevicesConfig(peak_flops=1e12)) == DevicesConfig(kind="cpu", peak_flops=1e12)
    with pytest.raises(pydantic.ValidationError, match="make them equal"):
        Accelerator(count=4, cp=2).devices(DevicesConfig())
