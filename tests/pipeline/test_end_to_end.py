"""Three drops to a trained model and its account, through the jobs, checks and launched processes of the project."""

import json
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from assets.store import current
from pipeline.definitions import build
from tests.assets.small import DROPS, WEEK, write_project
from training.config import ProjectConfig
from training.data.shards import open_dataset


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> ProjectConfig:
    return write_project(tmp_path_factory.mktemp("project"), model=True)


@pytest.fixture(scope="module")
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as instance:
        yield instance


def run(
    project: ProjectConfig,
    instance: dg.DagsterInstance,
    job: str,
    partition: str | None = None,
    only: str | None = None,
) -> dg.ExecuteInProcessResult:
    return (
        build(project)
        .resolve_job_def(job)
        .execute_in_process(
            partition_key=partition,
            instance=instance,
            raise_on_error=False,
            asset_selection=[dg.AssetKey(only)] if only else None,
        )
    )


def shown(instance: dg.DagsterInstance, asset: str, partition: str) -> dict:
    found = current(instance, asset, [partition])[partition]
    return {key: value.value for key, value in found.metadata.items()}


def failure(result) -> str:
    (step,) = [event for event in result.all_events if event.is_step_failure]
    data = step.step_failure_data
    return data.user_failure_data.description if data.user_failure_data else data.error.to_string()


@pytest.fixture(scope="module")
def prepared(project, instance):
    results = {drop: run(project, instance, "prepare_preferences", drop) for drop in DROPS}
    assert all(result.success for result in results.values())
    return results


@pytest.fixture(scope="module")
def trained(project, instance, prepared):
    result = run(project, instance, "train_policy", WEEK)
    assert result.success, failure(result)
    return result


def test_preparation_counts_every_row_and_passes_its_checks(project, instance, prepared):
    for drop, rows, refused in zip(DROPS, (24, 16, 14), (0, 0, 2), strict=True):
        made = shown(instance, "preference_shards", drop)
        assert (made["rows"], made["quarantined"], made["dagster/row_count"]) == (rows, refused, rows - refused)
        assert made["lengths"].startswith("![tokens of each part of a pair](data:image/png;base64,")
        checks = {one.check_name: one.passed for one in prepared[drop].get_asset_check_evaluations()}
        assert checks == dict.fromkeys(
            ("shards_match_manifest", "tokens_match_manifest", "targets_stay_inside", "quarantine_share"), True
        )
    words = shown(instance, "preference_pairs", DROPS[2])
    assert "| identical | 1 |" in words["reasons"] and words["path"].startswith("pairs/org%2Fwords%2Ev2/2026-11-11/")


def test_preparing_again_makes_nothing_new(project, instance, prepared):
    before = current(instance, "preference_shards", [DROPS[0]])[DROPS[0]]
    assert run(project, instance, "prepare_preferences", DROPS[0]).success
    after = current(instance, "preference_shards", [DROPS[0]])[DROPS[0]]
    assert (after.fingerprint, after.path) == (before.fingerprint, before.path)
    assert shown(instance, "preference_shards", DROPS[0])["reused"] is True


def test_the_plan_reads_every_drop_of_its_week(instance, trained):
    plan = shown(instance, "step_plan", WEEK)
    assert plan["drops"] == sorted(DROPS) and plan["missing_drops"] == []
    assert plan["pairs"] + plan["held_out"] == 24 + 16 + 12
    assert plan["steps"] == -(-plan["pairs"] // 8)
    assert 0 < plan["loss_density"] < plan["pack_fill"] <= 1


def test_the_run_is_as_planned(project, instance, trained):
    plan, made = shown(instance, "step_plan", WEEK), shown(instance, "dpo_run", WEEK)
    assert (made["step"], made["dagster/row_count"]) == (plan["steps"], plan["steps"])
    (check,) = [one for one in trained.get_asset_check_evaluations() if one.check_name == "plan_equals_ledger"]
    assert check.passed
    run_dir = Path(project.store) / made["path"]
    attempt = json.loads((run_dir / "attempts/0001/attempt.json").read_text())
    assert (attempt["dagster_run_id"], attempt["outcome"]) == (trained.run_id, "finished")
    for picture in ("fill_and_loss_density", "loss_and_accuracy"):
        assert "data:image/png;base64," in made[picture]


def test_the_model_and_its_judgement(project, instance, trained):
    model = shown(instance, "aligned_model", WEEK)
    assert (Path(project.store) / model["path"] / "model.safetensors").is_file()
    assert "# run-" in model["model_card"]
    plan, judged = shown(instance, "step_plan", WEEK), shown(instance, "preference_eval", WEEK)
    assert judged["pairs"] == plan["held_out"] > 0
    assert 0 <= judged["accuracy"] <= 1


def test_training_a_finished_week_again_does_nothing(project, instance, trained):
    before = shown(instance, "dpo_run", WEEK)["path"]
    result = run(project, instance, "train_policy", WEEK, only="dpo_run")
    assert result.success, failure(result)
    attempts = list((Path(project.store) / before / "attempts").iterdir())
    assert (shown(instance, "dpo_run", WEEK)["path"], len(attempts)) == (before, 1)


def test_the_account_agrees(project, instance, trained):
    result = run(project, instance, "account_for_tokens")
    assert result.success, failure(result)
    (check,) = result.get_asset_check_evaluations()
    assert (check.check_name, check.passed) == ("accounts_agree", True)
    (report,) = result.asset_materializations_for_node("fill_report")
    plan = shown(instance, "step_plan", WEEK)
    assert report.metadata["pack_fill"].value == pytest.approx(plan["pack_fill"], abs=0)
    assert report.metadata["source_tokens"].value == plan["source_tokens"]
    assert report.metadata["unknown_steps"].value == 0


def test_scores_of_a_drop_that_a_run_computed_are_found(project, instance, trained):
    result = run(project, instance, "score_references", DROPS[0])
    assert result.success, failure(result)
    made = shown(instance, "reference_scores", DROPS[0])
    assert (made["reused"], made["pairs"]) == (True, 24)


def test_an_altered_shard_stops_the_run_before_a_process_starts(project, instance, trained):
    path = Path(project.store) / current(instance, "preference_shards", [DROPS[1]])[DROPS[1]].path
    shard = path / open_dataset(path).manifest.shards[0].file
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-64] + bytes([whole[-64] ^ 1]) + whole[-63:])
    try:
        result = run(project, instance, "train_policy", WEEK, only="dpo_run")
        assert not result.success
        # a sentence of this process; a launched one would be named with its exit code
        assert failure(result).startswith(f"{shard}: its digest is ")
    finally:
        shard.write_bytes(whole)
