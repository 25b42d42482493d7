"""The demonstration: what a killed one leaves behind is put in order; played to its end, it keeps what it promises."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import dagster as dg
import pytest

from pipeline.demo.runs import TAG, Stage, end_abandoned, metadata, process
from training.errors import TrainingError

ROOT = Path(__file__).parents[2]
NOBODY = 2**22 + 1
"""Above the largest process number of Linux."""


@dg.asset(pool="accelerator")
def wanted() -> dg.MaterializeResult:
    return dg.MaterializeResult(metadata={"pairs": 3})


@dg.asset
def broken() -> None:
    raise dg.Failure("the shards are gone")


@pytest.fixture
def instance():
    pools = {"concurrency": {"pools": {"granularity": "op", "default_limit": 1}}}
    with dg.instance_for_test(overrides=pools) as instance:
        yield instance


@pytest.fixture
def stage(instance, tmp_path) -> Stage:
    jobs = [dg.define_asset_job(one.key.path[0], dg.AssetSelection.assets(one)) for one in (wanted, broken)]
    definitions = dg.Definitions(assets=[wanted, broken], jobs=jobs)
    return Stage(definitions=definitions, instance=instance, log=tmp_path / "output.log")


def going(stage: Stage, tags: dict[str, str]) -> str:
    """A run of somebody's that is marked as started, and holds the pool."""
    job = stage.definitions.resolve_job_def("wanted")
    run = stage.instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags=tags)
    stage.instance.event_log_storage.initialize_concurrency_limit_to_default("accelerator")
    claim = stage.instance.event_log_storage.claim_concurrency_slot("accelerator", run.run_id, "wanted")
    assert claim.is_claimed
    return run.run_id


def test_a_job_runs_and_says_what_it_made(stage):
    assert metadata(stage.run("wanted"), "wanted") == {"pairs": 3}
    assert len(stage.runs) == 1


def test_a_failed_job_says_which_step_and_why(stage):
    with pytest.raises(TrainingError, match=r"of broken failed: broken: the shards are gone \(output: .*output\.log\)"):
        stage.run("broken")


def test_what_a_killed_demonstration_holds_is_freed(stage):
    run_id = going(stage, {TAG: process(NOBODY)})
    assert end_abandoned(stage.instance) == 1
    assert stage.instance.get_run_by_id(run_id).status == dg.DagsterRunStatus.FAILURE
    assert metadata(stage.run("wanted"), "wanted") == {"pairs": 3}  # with the pool held it would wait for ever


@pytest.mark.parametrize("tags", [{TAG: process(os.getpid())}, {TAG: f"{NOBODY}@another-machine"}, {}])
def test_what_others_run_is_left_alone(stage, tags):
    run_id = going(stage, tags)
    assert end_abandoned(stage.instance) == 0
    assert stage.instance.get_run_by_id(run_id).status == dg.DagsterRunStatus.STARTED
    assert stage.instance.event_log_storage.get_concurrency_run_ids() == {run_id}


def play(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pipeline.cli", "demo", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("DAGSTER_HOME", "PAIRLEDGER_CONFIG", "PAIRLEDGER_STORE"):
        env.pop(name, None)
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def shares(printed: str, row: str) -> list[float]:
    found = re.search(rf"{row} +([\d.]+) % +([\d.]+) %", printed)
    assert found, printed
    return [float(share) / 100 for share in found.groups()]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_killed_three_times_it_still_keeps_what_it_promises(tmp_path, seed):
    chance = random.Random(seed)
    for number, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9), (signal.SIGKILL, -9)):
        with play(tmp_path, "--seed", str(seed)) as killed:
            time.sleep(chance.uniform(3, 40))
            killed.send_signal(number)
            _, said = killed.communicate(timeout=30)
        assert (killed.returncode, said) == (code, "")
    with play(tmp_path, "--seed", str(seed)) as last:
        printed, said = last.communicate(timeout=240)
    assert (last.returncode, said) == (0, "")
    (_, preferred), (before, after) = shares(printed, "preferred"), shares(printed, "given")
    assert preferred >= 0.95
    assert after >= 0.85 and after - before >= 0.35
    assert "22.2 %" in printed and "37.5 %" in printed  # 12 learned tokens of 54 and of 32
