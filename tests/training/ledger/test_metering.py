"""Training with its account and without it: the same weights, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.training.memory import MemoryDataset, larger_number, run_config, write_model
from training import loop, setup
from training.ledger.meter import Unknown
from training.ledger.writer import LedgerWriter, read_ledger
from training.run import RunResult, run_training

DATASET = MemoryDataset(tuple(larger_number(30)))


def weights(result: RunResult) -> dict[str, torch.Tensor]:
    assert result.export is not None
    return AutoModelForCausalLM.from_pretrained(result.export).state_dict()


@pytest.mark.parametrize("off", ["the meter", "the ledger"])
def test_metering_on_and_off_is_the_same_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    monkeypatch.setattr(setup, "open_dataset", lambda path: DATASET)
    config = run_config(write_model(tmp_path / "model"))
    on = run_training(config, tmp_path / "on")
    calls: list[Any] = []
    with monkeypatch.context() as without:
        if off == "the meter":
            without.setattr(loop, "measure", lambda *packs, **sizes: calls.append(packs) or Unknown("switched off"))
        else:
            without.setattr(LedgerWriter, "append", lambda writer, record: calls.append(record) or True)
        other = run_training(config, tmp_path / "off")
    assert len(calls) == on.steps == other.steps > 5
    before, after = weights(on), weights(other)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert on.metrics == other.metrics
    whole, less = (read_ledger(run.run_dir / "attempts" / "0001" / "steps.jsonl")[0] for run in (on, other))
    assert all(record.counters for record in whole)
    if off == "the meter":
        assert [(r.loss, r.grad_norm, r.pairs) for r in less] == [(r.loss, r.grad_norm, r.pairs) for r in whole]
        assert {(r.counters, r.unknown_reason) for r in less} == {(None, "rank 0: switched off")}
