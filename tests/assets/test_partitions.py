"""Drops, weeks and folder names."""

import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from urllib.parse import unquote

import dagster as dg
import pytest

from assets.partitions import Drop, calendar, existing, folder_name, wanted
from training.config import ProjectConfig
from training.errors import ConfigError

CASES = Path(__file__).parents[1] / "cases"


def project(tmp_path: Path, **values) -> ProjectConfig:
    sources = {
        "dated": {"files": [str(tmp_path / "in/*/{drop}/part-*.jsonl")], "day": "2026-10-30"},
        "once": {"files": [str(tmp_path / "once.jsonl")], "day": "2026-11-04"},
    }
    return ProjectConfig.model_validate({"sources": sources, **values})


def land(tmp_path: Path, *days: str) -> None:
    for day in days:
        folder = tmp_path / "in" / "x" / day
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "part-0.jsonl").write_text("{}\n")


def test_folder_names_case_key_with_dot():
    keys = json.loads((CASES / "partition_keys.json").read_text())
    names = [folder_name(key) for key in keys]
    assert len({name.lower() for name in names}) == len(keys) == 7
    assert [unquote(name) for name in names] == keys
    assert all("/" not in name and "." not in name for name in names)


def test_the_partitions_in_the_ui_are_the_sources_names_case_key_with_dot():
    keys = json.loads((CASES / "partition_keys.json").read_text())
    today = datetime.now(UTC).date().isoformat()
    config = ProjectConfig.model_validate({"sources": {key: {"files": ["f"], "day": today} for key in keys}})
    listed = [Drop.of(key) for key in calendar(config).drops.get_partition_keys()]
    assert [drop.source for drop in listed] == keys
    assert {drop.day for drop in listed} == {today}
    assert [Drop.of(drop.key) for drop in listed] == listed


def test_weeks_start_on_monday_and_the_current_one_exists(tmp_path):
    weeks = calendar(project(tmp_path)).weeks.get_partition_keys()
    assert weeks[0] == "2026-10-26"  # the Monday of 2026-10-30, a Friday
    today = datetime.now(UTC).date()
    assert weeks[-1] == (today - timedelta(days=today.weekday())).isoformat()
    assert {date.fromisoformat(week).weekday() for week in weeks} == {0}


def test_drops_are_the_days_with_files(tmp_path):
    land(tmp_path, "2026-11-02", "2026-11-09", "2026-10-29", "2026-13-01", "9999-01-01")
    (tmp_path / "in" / "x" / "2026-11-03").mkdir()  # a day without a file
    found = [(drop.day, drop.source) for drop in existing(project(tmp_path))]
    # before the source's first day, no calendar day, not begun: none of these three is a drop
    assert found == [("2026-11-02", "dated"), ("2026-11-04", "once"), ("2026-11-09", "dated")]


@pytest.mark.parametrize(
    ("weeks", "days"),
    [
        (None, ["2026-11-02", "2026-11-04", "2026-11-15"]),
        (1, ["2026-11-15"]),
        (2, ["2026-11-02", "2026-11-04", "2026-11-15"]),
    ],
)
def test_a_week_wants_the_drops_up_to_its_sunday(tmp_path, weeks, days):
    land(tmp_path, "2026-11-02", "2026-11-15", "2026-11-16")
    config = project(tmp_path, weekly={"weeks": weeks})
    assert [drop.day for drop in wanted(config, "2026-11-09")] == days


def test_files_of_a_drop(tmp_path):
    sources = project(tmp_path).sources
    assert Drop(day="2026-11-02", source="dated").files(sources["dated"]) == (
        str(tmp_path / "in/*/2026-11-02/part-*.jsonl"),
    )
    assert Drop(day="2026-11-04", source="once").files(sources["once"]) == (str(tmp_path / "once.jsonl"),)
    with pytest.raises(
        ConfigError, match=r"'once'.* lands at 2026-11-04, not at 2026-11-05; materialise once × 2026-11-04"
    ):
        Drop(day="2026-11-05", source="once").files(sources["once"])


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({}, r"no \[sources.NAME\] is configured"),
        ({"a": {"files": ["f"]}}, r"sources\.a\.day = None; give the day at which it lands as YYYY-MM-DD"),
        ({"a": {"files": ["{drop}"], "day": "x"}}, r"sources\.a\.day = 'x'; give the first day of its dated drops"),
        ({"a|b": {"files": ["f"], "day": "2026-11-01"}}, r"source name 'a\|b' has a bar"),
        ({"a...b": {"files": ["f"], "day": "2026-11-01"}}, "three dots"),
        ({"a\nb": {"files": ["f"], "day": "2026-11-01"}}, "control character"),
        ({"a": {"files": ["f"], "day": "2026-02-30"}}, r"sources\.a\.day = '2026-02-30'"),
    ],
)
def test_refused_calendars(sources, message):
    with pytest.raises(ConfigError, match=message):
        calendar(ProjectConfig.model_validate({"sources": sources}))


def test_a_week_maps_to_its_own_days_in_dagster(tmp_path):
    plan = calendar(project(tmp_path))
    mapped: list[str] = []

    @dg.asset(partitions_def=plan.drops)
    def shards() -> None: ...

    @dg.asset(partitions_def=plan.weeks, deps=[shards])
    def plans(context: dg.AssetExecutionContext) -> None:
        mapped.extend(context.asset_partition_keys_for_input("shards"))

    dg.materialize([shards, plans], selection=[plans], partition_key="2026-11-02")
    assert {Drop.of(key).day for key in mapped} == {f"2026-11-0{day}" for day in range(2, 9)}
    assert len(set(mapped)) == 14
