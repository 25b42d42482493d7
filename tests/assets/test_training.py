"""The completeness of a week, overrides, and a run that is not the week's."""

from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest

from assets.partitions import Drop, calendar
from assets.training import Overrides, assets, prepared
from pipeline.definitions import build
from pipeline.resources import resources
from tests.assets.small import DROPS, WEEK, write_project
from training.config import RunConfig
from training.errors import PlanError
from training.ledger.facts import RUN, RunFacts, write_facts


@pytest.fixture
def instance():
    with dg.instance_for_test() as instance:
        yield instance


def ready(instance: dg.DagsterInstance, *keys: str) -> None:
    for key in keys:
        event = dg.AssetMaterialization("preference_shards", partition=key, metadata={"path": f"datasets/{key}"})
        instance.report_runless_asset_event(event)


def test_all_drops_are_wanted_by_default(tmp_path, instance):
    project = write_project(tmp_path)
    ready(instance, *DROPS[:2])
    with pytest.raises(PlanError) as caught:
        prepared(instance, project, WEEK)
    assert str(caught.value) == (
        "week 2026-11-09 wants 3 drops, but 1 are not prepared: org/words.v2 × 2026-11-11; materialise their "
        'preference_shards, or set weekly.completeness = "allow_missing" to train without them'
    )
    ready(instance, DROPS[2])
    found, missing = prepared(instance, project, WEEK)
    assert ([str(drop.key) for drop in found], missing) == (sorted(DROPS), [])


def test_missing_drops_are_left_out_and_recorded_where_allowed(tmp_path, instance):
    project = write_project(tmp_path, extra='[weekly]\ncompleteness = "allow_missing"\n')
    with pytest.raises(PlanError, match=r"no drop up to the end of week 2026-11-09 is prepared; not prepared: numbers"):
        prepared(instance, project, WEEK)
    ready(instance, DROPS[1])
    found, missing = prepared(instance, project, WEEK)
    assert [str(drop.key) for drop in found] == [DROPS[1]]
    assert missing == [Drop.of(DROPS[0]), Drop.of(DROPS[2])]


def test_a_week_before_any_drop(tmp_path, instance):
    with pytest.raises(PlanError, match="and no source has one; choose a later week"):
        prepared(instance, write_project(tmp_path), "2026-11-02")


def test_overrides_change_what_they_name():
    run = RunConfig()
    assert Overrides().applied(run) == run
    changed = Overrides(epochs=3, lr=1e-3, beta=0.5).applied(run)
    assert (changed.plan.epochs, changed.optimizer.lr, changed.objective.beta) == (3, 1e-3, 0.5)
    same = {"plan": run.plan, "optimizer": run.optimizer, "objective": run.objective}
    assert changed.model_copy(update=same) == run


class Elsewhere:
    """A launcher whose program trained on another plan."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.args: tuple[str, ...] = ()
        self.config = ""

    def run(self, context, program, *, watch=None):
        self.args, self.config = program.args, Path(program.args[1]).read_text(encoding="utf-8")
        folder = self.store / "runs" / "run-x"
        folder.mkdir(parents=True)
        facts = RunFacts(
            run_id="run-x", fingerprint="run1:x", plan="plan1:other", model="mdl1:x", layout="shared",
            created_at=datetime.now(UTC), datasets=(),
        )  # fmt: skip
        write_facts(folder / RUN, facts)
        return {"run_id": "run-x", "finished": True}


def test_a_run_over_another_plan_is_refused(tmp_path, instance):
    project = write_project(tmp_path)
    for drop in DROPS:
        job = build(project).resolve_job_def("prepare_preferences")
        assert job.execute_in_process(partition_key=drop, instance=instance).success
    launcher = Elsewhere(Path(project.store))
    result = dg.materialize(
        assets(calendar(project), project),
        selection=["step_plan", "dpo_run"],
        partition_key=WEEK,
        instance=instance,
        resources={**resources(project), "launcher": launcher},
        run_config={"ops": {"dpo_run": {"config": {"epochs": 7}}}},
        raise_on_error=False,
    )
    data = result.failure_data_for_node("dpo_run")
    assert data is not None and data.user_failure_data is not None
    assert "run run-x trained on plan plan1:other, but the week's step_plan is plan1:" in (
        data.user_failure_data.description or ""
    )
    assert launcher.args[2:] == ("--store", project.store, "--partition", WEEK)
    assert "epochs = 7" in launcher.config and launcher.config.count("datasets/") == 3
