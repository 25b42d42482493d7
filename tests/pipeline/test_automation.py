"""What schedules and sensors ask for, evaluated without a daemon against a temporary instance."""

from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest

from assets.partitions import Drop
from assets.store import ShardStore
from pipeline.jobs import jobs
from pipeline.schedules import schedules
from pipeline.sensors import sensors
from training.config import ObjectiveConfig, ProjectConfig

MONDAY = datetime(2026, 11, 16, 6, tzinfo=UTC)


@pytest.fixture
def project(tmp_path) -> ProjectConfig:
    sources = {
        "daily": {"files": [str(tmp_path / "{drop}.jsonl")], "day": "2026-11-01"},
        "once": {"files": [str(tmp_path / "once.jsonl")], "day": "2026-11-04"},
    }
    return ProjectConfig.model_validate({"sources": sources, "store": str(tmp_path / "store")})


@pytest.fixture
def instance():
    with dg.instance_for_test() as instance:
        yield instance


def land(tmp_path: Path, *days: int) -> None:
    for day in days:
        (tmp_path / f"2026-11-{day:02}.jsonl").write_text("{}\n")


def made(instance: dg.DagsterInstance, asset: str, *drops: tuple[str, str]) -> None:
    for day, source in drops:
        key = Drop(day=day, source=source).key
        instance.report_runless_asset_event(dg.AssetMaterialization(asset, partition=str(key)))


def asked(result) -> list[str]:
    return [str(request.partition_key) for request in result]


def tick(project: ProjectConfig, instance: dg.DagsterInstance, name: str):
    (schedule,) = [one for one in schedules(project) if one.name == name]
    return schedule(dg.build_schedule_context(instance=instance, scheduled_execution_time=MONDAY))


def sense(project: ProjectConfig, instance: dg.DagsterInstance, name: str, cursor: str | None = None):
    (sensor,) = [one for one in sensors(project) if one.name == name]
    context = dg.build_sensor_context(
        instance=instance, cursor=cursor, resources={"store": ShardStore(root=project.store)}
    )
    return sensor(context)


def test_a_night_asks_for_what_is_missing_a_few_at_a_time(tmp_path, project, instance):
    land(tmp_path, *range(1, 13))
    made(instance, "preference_shards", ("2026-11-02", "daily"))
    found = tick(project, instance, "prepare_every_night")
    days = [1, 3, 4, 4, 5, 6, 7, 8]  # eight, oldest first, without the second; `once` lands on the fourth
    assert asked(found) == [f"2026-11-{day:02}|{'once' if i == 3 else 'daily'}" for i, day in enumerate(days)]
    assert found[0].run_key == "2026-11-01|daily@2026-11-16"


def test_scores_are_asked_for_prepared_drops_only(tmp_path, project, instance):
    land(tmp_path, 1, 2, 3)
    made(instance, "preference_shards", ("2026-11-01", "daily"), ("2026-11-03", "daily"))
    made(instance, "reference_scores", ("2026-11-01", "daily"))
    assert asked(tick(project, instance, "score_every_night")) == ["2026-11-03|daily"]
    made(instance, "reference_scores", ("2026-11-03", "daily"))
    assert tick(project, instance, "score_every_night").skip_message == "every prepared drop has its reference scores"


def test_monday_asks_for_the_week_that_ended(tmp_path, project, instance):
    assert tick(project, instance, "train_every_week").partition_key == "2026-11-09"
    late = project.model_copy(
        update={"sources": {"once": project.sources["once"].model_copy(update={"day": "2026-11-16"})}}
    )
    assert (
        "no source has a drop up to the end of week 2026-11-09" in tick(late, instance, "train_every_week").skip_message
    )


def test_a_new_drop_is_asked_for_once(tmp_path, project, instance):
    made(instance, "preference_shards", ("2026-11-04", "once"))
    assert sense(project, instance, "prepare_new_drops").skip_message == "no new drop"
    land(tmp_path, 5)
    (request,) = sense(project, instance, "prepare_new_drops")
    assert (request.partition_key, request.run_key) == ("2026-11-05|daily", "2026-11-05|daily")


def test_a_ledger_that_grew_is_loaded(tmp_path, project, instance):
    assert sense(project, instance, "load_growing_ledgers").skip_message == "no ledger has grown"
    attempt = Path(project.store) / "runs" / "run-1" / "attempts" / "0001"
    attempt.mkdir(parents=True)
    (attempt / "steps.jsonl").write_text("12345\n")
    result = sense(project, instance, "load_growing_ledgers")
    assert ([request.run_key for request in result.run_requests], result.cursor) == (["6"], "6")
    assert sense(project, instance, "load_growing_ledgers", result.cursor).skip_message == "no ledger has grown"
    (attempt / "steps.jsonl").write_text("12345\n6\n")
    assert sense(project, instance, "load_growing_ledgers", result.cursor).cursor == "8"


def test_all_are_off_until_switched_on(project):
    automatic = [*schedules(project), *sensors(project)]
    assert len(automatic) == 5
    assert {one.default_status.value for one in automatic} == {"STOPPED"}
    assert {one.job_name for one in automatic} <= {job.name for job in jobs(project)}


def test_nothing_is_scored_for_an_objective_without_a_reference(project):
    free = project.model_copy(update={"objective": ObjectiveConfig(losses={"simpo": 1.0}, reference="none")})
    assert [job.name for job in jobs(free)] == ["prepare_preferences", "train_policy", "account_for_tokens"]
    assert [one.name for one in schedules(free)] == ["prepare_every_night", "train_every_week"]
