"""A run's ledger as it is shown: live observations, and the steps that stand after a resume."""

import json
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest

from assets.progress import Progress, numbers, recorded
from training.errors import LedgerError
from training.geometry import Counters
from training.ledger.facts import ATTEMPT, AttemptFacts, write_facts
from training.ledger.record import StepRecord
from training.ledger.writer import LedgerWriter

NOW = datetime(2026, 11, 16, tzinfo=UTC)


def record(step: int, attempt: int = 1, *, known: bool = True, loss: float = 0.5) -> StepRecord:
    counters = Counters(
        window_tokens=400, physical_tokens=300, aligned_tokens=300, source_tokens=200, logical_tokens=250,
        loss_tokens=50, chosen_loss_tokens=30, rejected_loss_tokens=20, documents=8, pairs=4, packs=1, empty_packs=0,
        max_document_tokens=60, sum_document_tokens_squared=9000,
    )  # fmt: skip
    return StepRecord(
        run_id="run-1", attempt=attempt, step=step, epoch=0, ended_at=NOW, counters=counters if known else None,
        flops=None, ranks_expected=1, ranks_reported=1 if known else 0, unknown_reason=None if known else "lost",
        loss=loss, grad_norm=1.0, learning_rate=1e-6, wins=3, ties=0, chosen_reward_sum=1.0, rejected_reward_sum=0.0,
        data_s=0.0, compute_s=0.0, optimizer_s=0.0, save_s=0.0, sources=(), pairs=(),
    )  # fmt: skip


def start(run: Path, number: int, from_step: int, dagster_run_id: str | None = None) -> LedgerWriter:
    folder = run / "attempts" / f"{number:04}"
    folder.mkdir(parents=True)
    facts = AttemptFacts(
        dagster_run_id=dagster_run_id, from_step=from_step, started_at=NOW, device="cpu", pack_tokens=400
    )
    write_facts(folder / ATTEMPT, facts)
    return LedgerWriter(folder / "steps.jsonl")


def write(run: Path, number: int, from_step: int, *records: StepRecord) -> None:
    writer = start(run, number, from_step)
    for one in records:
        writer.append(one)
    writer.close()


def test_numbers_of_a_step():
    assert numbers(record(3)) == {
        "step": 3,
        "loss": 0.5,
        "accuracy": 3 / 4,
        "pack_fill": 200 / 400,
        "loss_density": 50 / 200,
    }
    assert numbers(record(3, known=False)) == {
        "step": 3,
        "loss": 0.5,
        "accuracy": None,
        "pack_fill": None,
        "loss_density": None,
    }


def test_the_steps_that_stand_are_those_no_later_attempt_made_again(tmp_path):
    write(tmp_path, 1, 1, *(record(step) for step in (1, 2, 3, 4)))
    write(tmp_path, 2, 3, record(3, 2))
    # the second attempt voids 3 and 4 of the first; the tenth comes after the second, not before it
    assert [(one.step, one.attempt) for one in recorded(tmp_path)] == [(1, 1), (2, 1), (3, 2)]
    write(tmp_path, 10, 2, record(2, 10))
    assert [(one.step, one.attempt) for one in recorded(tmp_path)] == [(1, 1), (2, 10)]


def test_an_attempt_without_its_facts_is_named(tmp_path):
    (tmp_path / "attempts" / "0001").mkdir(parents=True)
    with pytest.raises(LedgerError, match=r"0001/attempt\.json"):
        recorded(tmp_path)


def test_observations_follow_the_ledger_of_this_run_only(tmp_path):
    seen = []

    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(["2026-11-16"]))
    def dpo_run(context: dg.AssetExecutionContext) -> None:
        watch = Progress(context, tmp_path, every_s=0)
        watch()  # there is no run yet
        start(tmp_path / "run-0", 1, 1, "another run").append(record(9))
        own = start(tmp_path / "run-1", 1, 1, context.run.run_id)
        watch()  # its ledger is empty
        own.append(record(1, loss=float("nan")))
        watch()
        watch()  # nothing new
        with (tmp_path / "run-1" / "attempts" / "0001" / "steps.jsonl").open("ab") as ledger:
            ledger.write(b'{"format":1,"cut')
        watch()  # a line that is being written is no step
        seen.append(True)

    with dg.DagsterInstance.ephemeral() as instance:
        assert dg.materialize([dpo_run], instance=instance, partition_key="2026-11-16").success
        found = instance.fetch_observations(dg.AssetKey("dpo_run"), limit=10).records
    assert seen
    (observation,) = [one.event_log_entry.asset_observation for one in found]
    assert observation is not None and observation.partition == "2026-11-16"
    shown = {key: value.value for key, value in observation.metadata.items()}
    # a loss that was not finite is null in the ledger, and left out here
    assert shown == {"step": 1, "accuracy": 0.75, "pack_fill": 0.5, "loss_density": 0.25}
    json.dumps(shown, allow_nan=False)


def test_observations_keep_their_distance(tmp_path):
    shown = []

    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(["w"]))
    def dpo_run(context: dg.AssetExecutionContext) -> None:
        own = start(tmp_path / "run-1", 1, 1, context.run.run_id)
        watch = Progress(context, tmp_path, every_s=60)
        for step in (1, 2, 3):
            own.append(record(step))
            watch()
            shown.append(step)

    with dg.DagsterInstance.ephemeral() as instance:
        dg.materialize([dpo_run], instance=instance, partition_key="w")
        assert len(instance.fetch_observations(dg.AssetKey("dpo_run"), limit=10).records) == 1
    assert shown == [1, 2, 3]
