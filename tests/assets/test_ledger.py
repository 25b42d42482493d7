"""The account's assets over runs written by hand: the numbers shown are worked out here."""

from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest

from assets.ledger import assets
from assets.store import ShardStore, TokenLedger
from tests.training.ledger.records import record
from training.geometry import Counters
from training.ledger.facts import ATTEMPT, RUN, AttemptFacts, RunFacts, write_facts
from training.ledger.record import SourceRow
from training.ledger.writer import STEPS, LedgerWriter

NOW = datetime(2026, 11, 16, tzinfo=UTC)


def counted(window: int, source: int, loss: int) -> Counters:
    return Counters(
        window_tokens=window, physical_tokens=source, aligned_tokens=source, source_tokens=source,
        logical_tokens=source, loss_tokens=loss, chosen_loss_tokens=loss, documents=4, pairs=2, packs=1,
        max_document_tokens=source, sum_document_tokens_squared=source,
    )  # fmt: skip


def of_source(name: str, source: int, loss: int) -> SourceRow:
    return SourceRow(
        source=name, pairs=1, documents=2, source_tokens=source, logical_tokens=source, loss_tokens=loss,
        chosen_loss_tokens=loss, rejected_loss_tokens=0, flops=None, loss_sum=0.5, wins=1, ties=0,
        chosen_reward_sum=1.0, rejected_reward_sum=0.5,
    )  # fmt: skip


def write_run(store: Path, run_id: str, steps: list[tuple[int, int, int]]) -> LedgerWriter:
    folder = store / "runs" / run_id
    attempt = folder / "attempts" / "0001"
    attempt.mkdir(parents=True)
    run = RunFacts(
        run_id=run_id, partition="2026-11-16", fingerprint="run1:a", plan="plan1:a", model="mdl1:a", layout="shared",
        created_at=NOW, datasets=(),
    )  # fmt: skip
    write_facts(folder / RUN, run)
    write_facts(attempt / ATTEMPT, AttemptFacts(from_step=1, started_at=NOW, device="cpu", pack_tokens=100))
    ledger = LedgerWriter(attempt / STEPS)
    for number, (window, source, loss) in enumerate(steps, 1):
        append(ledger, run_id, number, window, source, loss)
    return ledger


def append(ledger: LedgerWriter, run_id: str, step: int, window: int, source: int, loss: int) -> None:
    half = source // 2
    sources = (of_source("a", half, loss), of_source("b", source - half, 0))
    counters = counted(window, source, loss)
    ledger.append(record(step, run_id=run_id, attempt=1, counters=counters, sources=sources))


def materialize(store: Path, instance: dg.DagsterInstance, *names: str) -> dict[str, dg.AssetMaterialization]:
    own = assets()
    resources = {"store": ShardStore(root=str(store)), "ledger": TokenLedger(root=str(store))}
    result = dg.materialize(own, selection=list(names), instance=instance, resources=resources, raise_on_error=False)
    assert result.success, [event.event_specific_data for event in result.all_events if event.is_failure]
    return {one.asset_key.to_user_string(): one for one in result.asset_materializations_for_node("token_ledger")} | {
        one.asset_key.to_user_string(): one for one in result.asset_materializations_for_node("fill_report")
    }


def shown(made: dg.AssetMaterialization) -> dict[str, object]:
    return {key: value.value for key, value in made.metadata.items()}


def version(made: dg.AssetMaterialization) -> str:
    return (made.tags or {})["dagster/data_version"]


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


def test_the_report_weighs_by_tokens(tmp_path, instance):
    write_run(tmp_path, "run-1", [(200, 100, 50), (200, 180, 20)])
    write_run(tmp_path, "run-2", [(400, 40, 10)])
    made = materialize(tmp_path, instance, "token_ledger", "fill_report")
    assert shown(made["token_ledger"])["rows/step"] == shown(made["token_ledger"])["dagster/row_count"] == 3
    report = shown(made["fill_report"])
    assert report["pack_fill"] == (100 + 180 + 40) / (200 + 200 + 400)  # not the mean of 0.5, 0.9 and 0.1
    assert report["loss_density"] == (50 + 20 + 10) / (100 + 180 + 40)
    assert (report["pairs"], report["steps"], report["unknown_steps"]) == (6, 3, 0)
    rows = [line for line in str(report["sources"]).splitlines() if line.startswith("| run-1 | a")]
    assert rows == [f"| run-1 | a | 2 | {50 + 90} | {50 + 20} | 0.5 | 1 | 0.5 | 1 | 0.5 |"]  # loss tokens 70 of 140
    assert str(report["fill"]).startswith("![pack fill by step, newest runs](data:image/png;base64,")


def test_loading_again_changes_nothing_and_growth_is_a_new_version_case_backfill_lock(tmp_path, instance):
    ledger = write_run(tmp_path, "run-1", [(200, 100, 50)])
    first = materialize(tmp_path, instance, "token_ledger")["token_ledger"]
    again = materialize(tmp_path, instance, "token_ledger")["token_ledger"]
    assert version(first) == version(again)
    assert (shown(again)["files_read"], shown(again)["rows/step"]) == (0, 1)
    append(ledger, "run-1", 2, 200, 100, 50)
    grown = materialize(tmp_path, instance, "token_ledger")["token_ledger"]
    assert version(grown) != version(first)
    assert shown(grown)["rows/step"] == 2


def test_a_cut_line_is_shown(tmp_path, instance):
    write_run(tmp_path, "run-1", [(200, 100, 50)])
    with (tmp_path / "runs/run-1/attempts/0001" / STEPS).open("ab") as file:
        file.write(b'{"format":1,')
    made = materialize(tmp_path, instance, "token_ledger")["token_ledger"]
    assert "the last line was cut after 12 bytes" in str(shown(made)["cut_lines"])


def test_a_report_without_steps_is_a_failure(tmp_path, instance):
    write_run(tmp_path, "run-1", [])
    resources = {"store": ShardStore(root=str(tmp_path)), "ledger": TokenLedger(root=str(tmp_path))}
    result = dg.materialize(assets(), instance=instance, resources=resources, raise_on_error=False)
    data = result.failure_data_for_node("fill_report")
    assert data is not None and data.user_failure_data is not None
    assert "no run has recorded a step yet" in (data.user_failure_data.description or "")
