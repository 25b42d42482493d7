"""Checkpoints: all state comes back, half a one is none, another run's is refused."""

from __future__ import annotations

import json
import random
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from tests.training.memory import write_model
from training import checkpoint as room
from training import receipt
from training.checkpoint import Saver, restore, verified
from training.config import ModelConfig, OptimizerConfig, SaveConfig
from training.errors import IdentityError, TrainingError
from training.model import Policy
from training.parallel.device import pick
from training.parallel.mesh import ALONE
from training.receipt import Checkpoint, check_identity, compare, complete, open_checkpoint
from training.scores import open_policy
from training.step import build_optimizer

IDENTITY = {"tokenizer": "tok1:a", "plan": "plan1:a", "objective": "o", "schedule": "s"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("checkpoint") / "model")


def fresh(model: Path) -> tuple[Policy, torch.optim.AdamW]:
    policy = open_policy(ModelConfig(path=str(model)), pick("cpu"))
    return policy, build_optimizer(policy.module, OptimizerConfig(lr=1e-2, weight_decay=0.1))


def trained(model: Path, steps: int = 2) -> tuple[Policy, torch.optim.AdamW]:
    policy, optimizer = fresh(model)
    for step in range(steps):
        for i, parameter in enumerate(policy.module.parameters()):
            parameter.grad = torch.sin(torch.arange(parameter.numel(), dtype=torch.float32) + i + step).view_as(
                parameter
            )
        optimizer.step()
    return policy, optimizer


def saver(folder: Path, policy: Policy, optimizer: torch.optim.AdamW, **config: object) -> Saver:
    settings = SaveConfig.model_validate({"keep": 5, **config})
    return Saver(folder=folder, module=policy.module, optimizer=optimizer, identity=IDENTITY, config=settings)


def kept(folder: Path, step: int, policy: Policy, optimizer: torch.optim.AdamW, keep: int = 5) -> Path:
    saves = saver(folder, policy, optimizer, keep=keep)
    saves.begin(step, {"total": 9})
    saves.drain()
    saves.close()
    return folder / f"step_{step}"


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    found, skipped = complete(folder)
    return (found[0] if found else None), skipped


def only(folder: Path) -> Checkpoint:
    found, skipped = newest(folder)
    assert found is not None and not skipped
    return found


def test_weights_moments_steps_and_random_states_come_back_bit_for_bit(model: Path, tmp_path: Path) -> None:
    """case: resume-loses-moments"""
    policy, optimizer = trained(model)
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)
    kept(tmp_path, 2, policy, optimizer)
    drawn = (random.random(), np.random.random(), torch.rand(1).item())
    other, other_optimizer = fresh(model)
    restore(only(tmp_path), other.module, other_optimizer)
    assert (random.random(), np.random.random(), torch.rand(1).item()) == drawn
    names = [name for name, _ in policy.module.named_parameters()]
    assert len(names) > 20
    for a, b in zip(policy.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(a, b)
        mine, theirs = optimizer.state[a], other_optimizer.state[b]
        assert set(theirs) == {"step", "exp_avg", "exp_avg_sq"} and mine["exp_avg"].any()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_step_without_its_manifest_is_named_and_skipped(model: Path, tmp_path: Path) -> None:
    """case: half-written-checkpoint; vectors 26, 29"""
    policy, optimizer = trained(model)
    for step in (20, 30):
        kept(tmp_path, step, policy, optimizer)
    (tmp_path / "step_30" / "manifest.json").unlink()
    found, skipped = newest(tmp_path)
    assert found is not None and found.step == 20
    assert len(skipped) == 1 and "step_30" in skipped[0]
    (tmp_path / "step_20" / "manifest.json").write_text('{"format": 0}', encoding="utf-8")
    assert newest(tmp_path)[0] is None and newest(tmp_path / "none") == (None, [])


def test_a_kill_while_saving_leaves_no_checkpoint_and_the_next_save_replaces_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """case: half-written-checkpoint"""
    policy, optimizer = trained(model)
    kept(tmp_path, 2, policy, optimizer, keep=1)

    def killed(*args: object, **kwargs: object) -> None:
        raise OSError("the disk went away")

    with monkeypatch.context() as patched:
        patched.setattr(room, "commit", killed)
        with pytest.raises(TrainingError, match=r"step_4: could not be saved: the disk went away"):
            kept(tmp_path, 4, policy, optimizer, keep=1)
    found, skipped = newest(tmp_path)
    assert found is not None and found.step == 2 and "step_4" in skipped[0]
    kept(tmp_path, 4, policy, optimizer, keep=1)
    assert only(tmp_path).step == 4 and not (tmp_path / "step_2").exists()


def test_the_newest_is_by_number(model: Path, tmp_path: Path) -> None:
    """case: latest-by-name"""
    policy, optimizer = trained(model, steps=1)
    kept(tmp_path, 1, policy, optimizer)
    for step in ("900", "1000", "0200"):
        shutil.copytree(tmp_path / "step_1", tmp_path / f"step_{step}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "step_old").mkdir()
    assert only(tmp_path).step == 1000
    kept(tmp_path, 1001, policy, optimizer, keep=3)
    assert sorted(p.name for p in tmp_path.glob("step_*[0-9]")) == ["step_1000", "step_1001", "step_900"]


def test_an_altered_checkpoint_is_named_and_the_one_before_it_is_taken(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """case: half-written-checkpoint"""
    policy, optimizer = trained(model, steps=1)
    kept(tmp_path, 1, policy, optimizer)
    path = kept(tmp_path, 2, policy, optimizer)
    found, _ = complete(tmp_path)
    assert [c.step for c in found] == [2, 1]
    for file in (path / "dcp" / ".metadata", path / "dcp" / "__0_0.distcp", path / "state.json"):
        data = file.read_bytes()
        assert verified(found, ALONE) is found[0]
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert verified(found, ALONE) is found[1] and file.name in caplog.text
        caplog.clear()
        file.write_bytes(data[:-1])
        assert verified(found, ALONE) is found[1]
        file.unlink()
        assert verified(found, ALONE) is found[1] and "missing" in caplog.text
        assert verified(found[:1], ALONE) is None
        file.write_bytes(data)


def test_the_best_and_each_nth_stay_beside_the_newest_and_leftovers_go(model: Path, tmp_path: Path) -> None:
    policy, optimizer = trained(model, steps=1)
    saves = saver(tmp_path, policy, optimizer, keep=2, every=4)
    losses = {1: 0.9, 2: 0.3, 3: None, 4: 0.5, 5: 0.6, 6: 0.31, 7: 0.4}
    for step, loss in losses.items():
        saves.begin(step, {"held_out_loss": loss})
        saves.drain()
        if step == 3:
            (tmp_path / "step_3" / "manifest.json").unlink()
    saves.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_2", "step_4", "step_6", "step_7"]


def test_a_full_disk_is_noticed_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, optimizer = trained(model, steps=1)
    kept(tmp_path, 1, policy, optimizer)
    held = sum(f.stat().st_size for f in (tmp_path / "step_1" / "dcp").iterdir())
    monkeypatch.setattr(receipt.shutil, "disk_usage", lambda path: SimpleNamespace(free=held // 2))
    with pytest.raises(
        TrainingError, match=rf"has {held // 2} bytes free, and a checkpoint takes about \d+; free the disk"
    ):
        kept(tmp_path, 2, policy, optimizer)
    assert only_complete(tmp_path) == [1]


def only_complete(folder: Path) -> list[int]:
    return [c.step for c in complete(folder)[0]]


def test_a_save_in_the_background_holds_the_state_it_was_begun_with(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights move on while it is written; nothing of that is saved, and the step appears when it is whole."""
    policy, optimizer = trained(model, steps=2)
    before = [p.detach().clone() for p in policy.module.parameters()]
    gate, real = threading.Event(), room.save_state

    def slow(*args: object, **kwargs: object) -> object:
        assert gate.wait(30)
        return real(*args, **kwargs)

    monkeypatch.setattr(room, "save_state", slow)
    saves = saver(tmp_path, policy, optimizer)
    saves.begin(1, {})
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(1.0)
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
    assert saves.fault() is None and only_complete(tmp_path) == []
    gate.set()
    saves.drain()
    saves.close()
    other, other_optimizer = fresh(model)
    restore(only(tmp_path), other.module, other_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, other.module.parameters(), strict=True))
    assert all(state["exp_avg"].any() for state in other_optimizer.state.values())


def test_a_failed_save_is_told_once_to_who_asks_and_leaves_no_checkpoint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vector 30, in one process"""
    policy, optimizer = trained(model, steps=1)
    monkeypatch.setattr(room, "commit", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("quota")))
    saves = saver(tmp_path, policy, optimizer)
    saves.begin(1, {})
    saves.close()
    fault = saves.fault()
    assert isinstance(fault, TrainingError) and "step_1: could not be saved: quota" in str(fault)
    assert saves.fault() is None and only_complete(tmp_path) == []


def test_a_folder_that_is_named_is_a_checkpoint_or_is_told_apart(model: Path, tmp_path: Path) -> None:
    """vectors 26, 31: links and relative paths are one place; a model may seed weights and nothing else"""
    policy, optimizer = trained(model, steps=1)
    path = kept(tmp_path, 5, policy, optimizer)
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "notes").mkdir()
    assert (
        open_checkpoint(tmp_path / "link")
        == open_checkpoint(tmp_path / "link" / ".." / "step_5")
        == open_checkpoint(path)
    )
    with pytest.raises(IdentityError, match=r"is a model, not a checkpoint.*set model\.path to it"):
        open_checkpoint(model)
    with pytest.raises(IdentityError, match="is no complete checkpoint"):
        open_checkpoint(tmp_path)


def test_a_tensor_that_is_not_there_makes_the_load_fail_by_name(model: Path, tmp_path: Path) -> None:
    """case: resume-loses-moments"""
    policy, optimizer = trained(model, steps=1)
    path = kept(tmp_path, 1, policy, optimizer)
    weights, moments = get_state_dict(policy.module, optimizer)
    del moments["state"]["model.norm.weight"]
    shutil.rmtree(path / "dcp")
    save_state({"model": weights, "optimizer": moments}, checkpoint_id=path / "dcp", no_dist=True)
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"] = {}
    (path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(TrainingError, match=r"model\.norm\.weight"):
        restore(only(tmp_path), *fresh_parts(model))


def fresh_parts(model: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    policy, optimizer = fresh(model)
    return policy.module, optimizer


def test_every_difference_is_named_with_both_values_and_a_remedy(model: Path, tmp_path: Path) -> None:
    """vector 28"""
    policy, optimizer = trained(model, steps=1)
    kept(tmp_path, 1, policy, optimizer)
    found = only(tmp_path)
    check_identity(found, IDENTITY)
    other = {**IDENTITY, "tokenizer": "tok1:b", "schedule": "t"}
    assert [(d.field, d.saved, d.current) for d in compare(found.manifest, other)] == [
        ("schedule", "s", "t"),
        ("tokenizer", "tok1:a", "tok1:b"),
    ]
    with pytest.raises(IdentityError) as caught:
        check_identity(found, other)
    for words in ("schedule was s, and is t", "tokenizer was tok1:a, and is tok1:b", "prepare the datasets"):
        assert words in str(caught.value)
