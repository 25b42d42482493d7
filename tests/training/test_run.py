"""A whole run on a tiny model: its ledger is the plan's prediction, and stopping it changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.training.memory import MemoryDataset, larger_number, run_config, write_model
from training import checkpoint, setup
from training.attempt import owned
from training.checkpoint import Saver
from training.config import ModelConfig, RunConfig, dump
from training.convert import export_checkpoint
from training.errors import ConfigError, DeviceError, IdentityError, ModelError, TrainingError
from training.evaluate import held_out_logps
from training.geometry import Counters
from training.ledger.facts import AttemptFacts, RunFacts, read_facts
from training.ledger.record import StepRecord
from training.ledger.validation import read_validation
from training.ledger.writer import read_ledger
from training.parallel import device
from training.run import RunResult, main, run_training
from training.scores import open_policy

DATASET = MemoryDataset(tuple(larger_number(30)))
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("run") / "model")


@pytest.fixture(autouse=True)
def dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "open_dataset", lambda path: DATASET)


@pytest.fixture(scope="module")
def unbroken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(setup, "open_dataset", lambda path: DATASET)
        return run_training(run_config(model), tmp_path_factory.mktemp("unbroken"))


def records(result: RunResult) -> list[StepRecord]:
    attempts = sorted((result.run_dir / "attempts").iterdir())
    return [record for attempt in attempts for record in read_ledger(attempt / "steps.jsonl")[0]]


def stop_after(steps: int) -> Callable[[], bool]:
    """Says stop after so many steps of a run that has its pairs scored first, where it is asked once."""
    asked = iter(range(1000))
    return lambda: next(asked) >= steps


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def numbers(record: StepRecord) -> tuple[Any, ...]:
    """All that a step computed; not when, nor how long it took."""
    names = (
        "step",
        "epoch",
        "counters",
        "flops",
        "loss",
        "grad_norm",
        "learning_rate",
        "wins",
        "ties",
        "sources",
        "pairs",
    )
    return tuple(getattr(record, name) for name in names)


def test_a_run_learns_records_and_exports(unbroken: RunResult, model: Path) -> None:
    steps = records(unbroken)
    assert unbroken.finished and unbroken.steps == 8 == len(steps)  # 30 pairs are 4 steps of 8, the last of 6
    assert [len(record.pairs) for record in steps[:4]] == [8, 8, 8, 6]
    losses = [record.loss or 0.0 for record in steps]
    assert losses[0] == pytest.approx(0.693147, abs=1e-5) and losses[-1] < 0.6
    before, after = weights(model), weights(unbroken.run_dir / "export")
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])
    assert unbroken.metrics["loss"] == losses[-1]


def test_the_ledger_is_what_the_plan_predicted(unbroken: RunResult) -> None:
    """case: tokens-include-pad"""
    with pa.memory_map(str(unbroken.run_dir / "predicted.arrow")) as source:
        predicted = pa.ipc.open_file(source).read_all().to_pylist()
    steps = records(unbroken)
    assert len(predicted) == len(steps)
    for row, record in zip(predicted, steps, strict=True):
        assert record.counters is not None and record.unknown_reason is None
        assert {f.name: row[f.name] for f in fields(Counters)} == {
            f.name: getattr(record.counters, f.name) for f in fields(Counters)
        }
    assert sum(r.counters.source_tokens for r in steps[:4] if r.counters) == sum(
        len(p.prompt_ids) + len(p.chosen_ids) + len(p.rejected_ids) for p in DATASET.pairs
    )


def test_rows_of_pairs_and_sources_add_up_to_the_step(unbroken: RunResult) -> None:
    """case: metrics-summed, ref-values-ignored"""
    for record in records(unbroken):
        losses = [pair.loss or 0.0 for pair in record.pairs]
        assert record.loss == pytest.approx(np.mean(losses), rel=1e-6)
        assert sum(row.loss_sum or 0.0 for row in record.sources) == pytest.approx(sum(losses), rel=1e-6)
        assert {row.source for row in record.sources} == {"even", "odd"}
        assert sum(row.wins or 0 for row in record.sources) == record.wins
        for pair in record.pairs:
            assert pair.pair_id == DATASET.pairs[pair.row].pair_id and pair.occurrence == record.epoch
            logps = (pair.policy_chosen_logp, pair.reference_chosen_logp, pair.policy_rejected_logp)
            chosen, reference, rejected = (x or 0.0 for x in logps)
            h = chosen - reference - rejected + (pair.reference_rejected_logp or 0.0)
            assert reference < 0 and pair.loss == pytest.approx(np.log1p(np.exp(-0.1 * h)), rel=1e-5)


@pytest.mark.parametrize("after", [1, 3, 4])
def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(
    unbroken: RunResult, model: Path, tmp_path: Path, after: int
) -> None:
    """case: resume-loses-packer, resume-loses-moments, lr-start-lost; vector 24"""
    first = run_training(run_config(model), tmp_path, stop=stop_after(after))
    assert (first.finished, first.steps, first.export) == (False, after, None)
    second = run_training(run_config(model), tmp_path)
    assert (second.run_id, second.attempt, second.finished) == (first.run_id, 2, True)
    assert [numbers(record) for record in records(second)] == [numbers(record) for record in records(unbroken)]
    mine, theirs = weights(second.run_dir / "export"), weights(unbroken.run_dir / "export")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    facts = [read_facts(second.run_dir / "attempts" / n / "attempt.json", AttemptFacts) for n in ("0001", "0002")]
    assert [(f.from_step, f.outcome) for f in facts] == [(1, "stopped"), (after + 1, "finished")]


def test_a_killed_attempt_is_made_again_from_the_last_checkpoint(
    unbroken: RunResult, model: Path, tmp_path: Path
) -> None:
    """case: half-written-checkpoint"""

    class Killed(BaseException):
        pass

    def kill(record: StepRecord, total: int) -> None:
        if record.step == 5:
            raise Killed

    with pytest.raises(Killed):
        run_training(run_config(model), tmp_path, progress=kill)
    result = run_training(run_config(model), tmp_path)
    facts = read_facts(result.run_dir / "attempts" / "0001" / "attempt.json", AttemptFacts)
    assert facts.outcome == "failed"
    assert [record.step for record in records(result)] == [1, 2, 3, 4, 5, 5, 6, 7, 8]  # step 4 ends an epoch
    assert [numbers(r) for r in records(result)[-4:]] == [numbers(r) for r in records(unbroken)[-4:]]


def checkpoints(result: RunResult) -> list[int]:
    return sorted(int(p.name.removeprefix("step_")) for p in (result.run_dir / "checkpoints").iterdir())


def test_triggers_that_coincide_make_one_save(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vector 32: every 4 steps, the end of an epoch and the last step are steps 4 and 8."""
    begun: list[int] = []
    real = Saver.begin
    monkeypatch.setattr(Saver, "begin", lambda self, step, facts: begun.append(step) or real(self, step, facts))
    result = run_training(run_config(model, save={"steps": 4, "keep": 9}), tmp_path / "one")
    assert begun == [4, 8] == checkpoints(result)
    begun.clear()
    run_training(run_config(model, save={"steps": None, "minutes": 1e-9, "keep": 9}), tmp_path / "two")
    assert begun == list(range(1, 9))


def test_where_to_resume_from_can_be_said(model: Path, tmp_path: Path) -> None:
    """vector 31, and what `--resume` refuses"""
    config = run_config(model, save={"steps": 3, "keep": 9})
    first = run_training(config, tmp_path / "one", stop=stop_after(5))
    assert checkpoints(first) == [3, 4, 5]
    with pytest.raises(TrainingError, match=r"checkpoints up to step 5, which --resume never would write over"):
        run_training(config, tmp_path / "one", resume="never")
    third = first.run_dir / "checkpoints" / "step_3"
    with pytest.raises(TrainingError, match=r"has a checkpoint of step 5, later than step 3 .*--fork"):
        run_training(config, tmp_path / "one", resume=str(third))
    with pytest.raises(IdentityError, match="is a model, not a checkpoint"):
        run_training(config, tmp_path / "one", resume=str(model))
    other = run_config(model, save={"steps": 3}, optimizer={"lr": 1e-4})
    with pytest.raises(IdentityError, match="optimizer was .*restore .optimizer. as it was"):
        run_training(other, tmp_path / "two", resume=str(third))
    (tmp_path / "link").symlink_to(third)
    elsewhere = run_training(config, tmp_path / "three", resume=str(tmp_path / "link"))
    assert elsewhere.finished and records(elsewhere)[0].step == 4


def test_an_altered_checkpoint_is_passed_over_and_named(model: Path, tmp_path: Path) -> None:
    first = run_training(run_config(model), tmp_path, stop=stop_after(5))
    state = first.run_dir / "checkpoints" / "step_5" / "state.json"
    state.write_text(state.read_text(encoding="utf-8") + " ", encoding="utf-8")
    second = run_training(run_config(model), tmp_path)
    assert records(second)[5].step == 5 and second.finished  # from step 4
    for folder in (first.run_dir / "checkpoints").iterdir():
        (folder / "state.json").unlink()
    with pytest.raises(IdentityError, match=r"step_8.*altered since they were saved; remove them"):
        run_training(run_config(model, plan={"epochs": 3}), tmp_path)


def test_a_checkpoint_is_exported_as_its_run_would_have(unbroken: RunResult, tmp_path: Path) -> None:
    last = unbroken.run_dir / "checkpoints" / "step_8"
    made = export_checkpoint(last, tmp_path / "model", dtype="source")
    mine, theirs = weights(made), weights(unbroken.run_dir / "export")
    assert len(mine) > 20 and all(torch.equal(mine[name], theirs[name]) for name in theirs)
    card = (made / "README.md").read_text(encoding="utf-8")
    assert card == (unbroken.run_dir / "export" / "README.md").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="is there already"):
        export_checkpoint(last, made, dtype="source")


def test_a_finished_run_is_left_alone_and_can_be_made_longer(model: Path, tmp_path: Path) -> None:
    first = run_training(run_config(model, plan={"epochs": 1}), tmp_path)
    again = run_training(run_config(model, plan={"epochs": 1}), tmp_path)
    assert (again.attempt, again.steps, again.finished, again.metrics) == (None, 4, True, {})
    assert len(list((first.run_dir / "attempts").iterdir())) == 1
    longer = run_training(run_config(model, plan={"epochs": 2}), tmp_path)
    assert (longer.run_id, longer.attempt, longer.steps) == (first.run_id, 2, 8)


def test_an_export_that_was_cut_off_is_made_without_training_again(model: Path, tmp_path: Path) -> None:
    import shutil

    first = run_training(run_config(model, plan={"epochs": 1}), tmp_path)
    before = weights(first.run_dir / "export")
    shutil.rmtree(first.run_dir / "export")
    again = run_training(run_config(model, plan={"epochs": 1}), tmp_path)
    assert again.finished and len(records(again)) == 4
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(again.run_dir / "export").items())


def test_what_a_run_is_decides_its_folder(unbroken: RunResult, model: Path, tmp_path: Path) -> None:
    """case: cache-key-too-small, path-in-key"""
    facts = read_facts(unbroken.run_dir / "run.json", RunFacts)
    assert facts.run_id == "run-" + facts.fingerprint.partition(":")[2][:12] == unbroken.run_id
    same = [{"plan": {"epochs": 7, "pack_tokens": 96}}, {"save": {"keep": 9}}, {"model": {"checkpointing": True}}]
    other = [
        {"plan": {"seed": 1}},
        {"objective": {"beta": 0.2}},
        {"optimizer": {"lr": 1e-4}},
        {"optimizer": {"schedule": "cosine"}},
        {"model": {"dtype": "bf16"}},
        {"plan": {"layout": "concat", "pack_tokens": 96}},
    ]

    def run_id(sections: dict[str, dict[str, Any]]) -> str:
        return setup.prepare(run_config(model, **sections), tmp_path).run_id

    assert {run_id(sections) for sections in same} == {unbroken.run_id}
    ids = [run_id(sections) for sections in other]
    assert len({*ids, unbroken.run_id}) == len(other) + 1
    parted = setup.prepare(run_config(model), tmp_path, "2026-11-09/a b")
    assert parted.run_dir.name == f"{unbroken.run_id}-2026-11-09%2Fa%20b"


def test_a_checkpoint_of_another_run_is_refused(model: Path, tmp_path: Path) -> None:
    """vectors 27, 28"""
    first = run_training(run_config(model), tmp_path, stop=stop_after(3))
    path = first.run_dir / "checkpoints" / "step_3" / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["identity"]["tokenizer"] = "tok1:other"
    path.write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(IdentityError, match="tokenizer was tok1:other, and is tok1:0"):
        run_training(run_config(model), tmp_path)


def test_one_process_owns_a_run_folder(tmp_path: Path) -> None:
    with owned(tmp_path), pytest.raises(TrainingError, match=f"in use by process {os.getpid()} on"), owned(tmp_path):
        raise AssertionError("two owners")
    with owned(tmp_path):
        pass


def test_settings_of_an_attempt_lie_beside_its_ledger(unbroken: RunResult, model: Path) -> None:
    attempt = unbroken.run_dir / "attempts" / "0001"
    text = (attempt / "config.toml").read_text(encoding="utf-8")
    assert RunConfig.model_validate(tomllib.loads(text)) == run_config(model)
    assert "steps 1 to 8" in (attempt / "output.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "sections",
    [
        {"objective": {"losses": {"orpo": 1.0}}},
        {"objective": {"losses": {"simpo": 1.0}, "beta": 2.0}},
        {"objective": {"losses": {"sigmoid": 0.5, "ipo": 0.5}, "sft_weight": 0.5}},
        {"model": {"dtype": "bf16", "checkpointing": True}},
        {"plan": {"layout": "concat", "pack_tokens": 96, "buckets": (64,)}},
    ],
    ids=["orpo", "simpo", "combined", "bf16-recomputed", "concat-buckets"],
)
def test_other_ways_to_train_learn_too(model: Path, tmp_path: Path, sections: dict[str, dict[str, Any]]) -> None:
    result = run_training(run_config(model, **sections), tmp_path)
    losses = [record.loss or 0.0 for record in records(result)]
    assert result.finished and np.isfinite(losses).all() and losses[-1] < losses[0]
    assert (tmp_path / "references").exists() == (
        set(sections.get("objective", {}).get("losses", {"dpo"})) - {"orpo", "simpo"} != set()
    )


def test_recomputed_activations_change_no_number(unbroken: RunResult, model: Path, tmp_path: Path) -> None:
    result = run_training(run_config(model, model={"checkpointing": True}), tmp_path)
    assert [numbers(record) for record in records(result)] == [numbers(record) for record in records(unbroken)]


def test_held_out_pairs_are_judged_while_it_trains(model: Path, tmp_path: Path) -> None:
    """The judgements are those that scoring the export gives, every held-out pair once, and they train nothing."""
    held = {"data": {"held_out_share": 0.3}, "save": {"steps": 3, "validate_steps": 2}}
    silent = run_training(run_config(model, data=held["data"]), tmp_path / "silent")
    judged = run_training(run_config(model, **held), tmp_path / "judged")
    assert [numbers(a) for a in records(judged)] == [numbers(a) for a in records(silent)]
    rows = read_validation(judged.run_dir / "attempts" / "0001" / "validation.jsonl")
    run = setup.prepare(run_config(model, **held), tmp_path)
    assert judged.export and 5 < len(run.plan.held_out) < 15
    assert [(row.step, row.source) for row in rows] == [(s, n) for s in (2, 4, 6) for n in ("even", "odd")]
    cpu = device.pick("cpu")
    settings = {"layout": "shared", "precision": "fp32", "device": cpu, "room": 64}
    after, before = (
        held_out_logps(open_policy(ModelConfig(path=str(path)), cpu), run.plan, run.datasets, **settings)
        for path in (judged.export, model)
    )
    h = (after - before)[:, 0] - (after - before)[:, 1]
    last = [row for row in rows if row.step == 6]
    assert sum(row.pairs for row in last) == len(h)
    assert sum(row.loss_sum or 0.0 for row in last) == pytest.approx(np.log1p(np.exp(-0.1 * h)).sum(), rel=1e-4)
    assert sum(row.wins for row in last) == (h > 0).sum() > 0
    refused = run_config(model, data={"held_out_share": 0.001}, save={"validate_steps": 2})
    with pytest.raises(ConfigError, match=r"validate_steps = 2, .* holds none of 30 pairs out"):
        run_training(refused, tmp_path / "none")


def test_what_cannot_be_trained_is_refused_before_the_run_folder_is_made(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"data\.datasets and model\.path"):
        run_training(run_config(model, data={"datasets": ()}), tmp_path)
    small = write_model(tmp_path / "small", vocab_size=31)
    with pytest.raises(ModelError, match="vocabulary of 61.*has 31"):
        run_training(run_config(small), tmp_path)
    odd = write_model(tmp_path / "odd", num_attention_heads=6)  # case: kv-heads-fewer
    with pytest.raises(ConfigError, match=r"ulysses = 4 cannot share the 6 attention heads .* one of 1, 2, 3, 6;"):
        setup.check_degrees(run_config(odd, devices={"processes": 4, "ulysses": 4}))
    with pytest.raises(ConfigError, match=r"processes = 2, but 1 process was started"):
        run_training(run_config(model, devices={"processes": 2, "cp": 2}), tmp_path)
    cpu = [device.pick("cpu")]
    monkeypatch.setattr(device, "available", lambda: cpu)
    with pytest.raises(DeviceError):
        run_training(run_config(model, devices={"kind": "npu"}), tmp_path)
    assert not (tmp_path / "runs").exists()


DRIVER = """
import sys, torch
from tests.training.memory import MemoryDataset, larger_number
from training import run, setup
torch.set_num_threads(1)
setup.open_dataset = lambda path: MemoryDataset(tuple(larger_number(30)))
sys.exit(run.main(sys.argv[1:]))
"""


def test_sigterm_ends_a_run_after_its_step_with_a_checkpoint(model: Path, tmp_path: Path) -> None:
    """case: cancel-leaves-children"""
    toml = tmp_path / "run.toml"
    toml.write_text(dump(run_config(model, plan={"epochs": 500}, save={"steps": 10000})), encoding="utf-8")
    command = [sys.executable, "-c", DRIVER, "--config", str(toml), "--store", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            break
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, errors
    last = json.loads(output.splitlines()[-1])
    run_dir = tmp_path / "runs" / last["run_id"]
    assert not last["finished"] and last["steps"] >= 2
    assert (run_dir / "checkpoints" / f"step_{last['steps']}" / "manifest.json").exists()
    assert read_facts(run_dir / "attempts" / "0001" / "attempt.json", AttemptFacts).outcome == "stopped"


def test_a_run_told_to_stop_while_it_scores_keeps_its_scores(
    unbroken: RunResult, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = run_training(run_config(model), tmp_path, stop=lambda: True)
    assert (first.finished, first.steps, first.metrics) == (False, 0, {})
    assert "told to stop with 0 of 30 pairs of a shard scored" in caplog.text
    assert not (first.run_dir / "checkpoints").exists() and not list(tmp_path.glob("references/*/mdl1*"))
    assert read_facts(first.run_dir / "attempts" / "0001" / "attempt.json", AttemptFacts).outcome == "stopped"
    second = run_training(run_config(model), tmp_path)
    assert [numbers(record) for record in records(second)] == [numbers(record) for record in records(unbroken)]


@pytest.mark.parametrize("stopping", [False, True])
def test_a_save_that_failed_in_the_background_is_told_even_when_the_run_is_stopped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopping: bool
) -> None:
    """The step's own save is made first, so that a stop loses nothing by it."""
    commit, begin = checkpoint.commit, Saver.begin

    def failing(path: Path, **facts: Any) -> None:
        if path.name == "step_3":
            raise OSError("quota")
        commit(path, **facts)

    def waiting(self: Saver, step: int, facts: Mapping[str, Any]) -> None:
        begin(self, step, facts)
        assert self._writing is not None
        self._writing.exception(30)  # it has failed before the next step asks

    monkeypatch.setattr(checkpoint, "commit", failing)
    monkeypatch.setattr(Saver, "begin", waiting)
    stop = stop_after(4 if stopping else 99)
    with pytest.raises(TrainingError, match=r"step_3: could not be saved: quota"):
        run_training(run_config(model), tmp_path, stop=stop)
    (run_dir,) = (tmp_path / "runs").iterdir()
    kept = {path.parent.name for path in run_dir.glob("checkpoints/*/manifest.json")}
    assert kept == {"step_4"}  # also the end of an epoch
    assert read_facts(run_dir / "attempts" / "0001" / "attempt.json", AttemptFacts).outcome == "failed"


def test_the_command_reports_and_fails_without_a_traceback(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """case: silent-success"""
    toml = tmp_path / "run.toml"
    toml.write_text(dump(run_config(model, plan={"epochs": 1})), encoding="utf-8")
    assert main(["--config", str(toml), "--store", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 4
    toml.write_text("[plan]\npairs_per_stp = 3\n", encoding="utf-8")
    assert main(["--config", str(toml), "--store", str(tmp_path)]) == 2
    found = capsys.readouterr()
    assert found.err.startswith("error: ") and "pairs_per_step" in found.err and "Traceback" not in found.err
