"""An adapter: what is trained, what is frozen, what is saved and what is exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.training.memory import MemoryDataset, larger_number, run_config, write_model
from training import adapter, setup
from training.config import LoraConfig, ModelConfig
from training.errors import IdentityError, ModelError
from training.ledger.writer import read_ledger
from training.parallel.device import pick
from training.run import RunResult, run_training
from training.scores import batch_of, open_policy, side_logps

CPU = pick("cpu")
LORA = {"rank": 4, "alpha": 8, "targets": ("q_proj", "down_proj")}
DATASET = MemoryDataset(tuple(larger_number(30)))


pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("adapter") / "model")


@pytest.fixture(autouse=True)
def dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "open_dataset", lambda path: DATASET)


def run(model: Path, store: Path, stop: Callable[[], bool] = lambda: False, **lora: object) -> RunResult:
    config = run_config(model, model={"lora": {**LORA, **lora}}, objective={"reference": "live"})
    return run_training(config, store, stop=stop)


def losses(result: RunResult) -> list[float | None]:
    attempts = sorted((result.run_dir / "attempts").iterdir())
    return [record.loss for attempt in attempts for record in read_ledger(attempt / "steps.jsonl")[0]]


def logits(module: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return module(torch.tensor([[5, 6, 7, 8, 9]])).logits


def test_only_the_adapter_is_trained_and_off_it_is_the_base(model: Path) -> None:
    lora = LoraConfig.model_validate(LORA)
    policy = open_policy(ModelConfig(path=str(model), lora=lora), CPU)
    trained = [name for name, p in policy.module.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 2 and all(".lora_" in name for name in trained)  # layers, targets, A and B
    _, batch = batch_of(larger_number(3), layout="shared", device=CPU.torch)
    base = side_logps(open_policy(ModelConfig(path=str(model)), CPU), batch)
    assert torch.equal(side_logps(policy, batch), base)  # B is 0
    with torch.no_grad():
        for name, parameter in policy.module.named_parameters():
            if ".lora_B" in name:
                parameter.fill_(0.1)
    assert float((side_logps(policy, batch) - base).detach().abs().min()) > 1e-3
    assert torch.equal(side_logps(policy.without_adapter(), batch), base)
    assert float((side_logps(policy, batch) - base).detach().abs().min()) > 1e-3  # on again


def test_the_merged_export_and_the_adapter_folder_are_the_same_model(model: Path, tmp_path: Path) -> None:
    whole = run(model, tmp_path / "whole")
    small = run(model, tmp_path / "small", export="adapter")
    assert losses(whole) == losses(small) and (losses(whole)[-1] or 1.0) < 0.69
    assert whole.export and small.export and not (small.export / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(model)
    untrained = logits(base)
    merged = logits(AutoModelForCausalLM.from_pretrained(whole.export))
    loaded = logits(PeftModel.from_pretrained(base, str(small.export)))
    torch.testing.assert_close(merged, loaded, rtol=1e-5, atol=1e-6)
    assert float((merged - untrained).abs().max()) > 1e-3


def test_a_resumed_adapter_is_the_unbroken_one_and_its_checkpoint_is_small(model: Path, tmp_path: Path) -> None:
    unbroken = run(model, tmp_path / "one")
    asked = iter(range(1, 100))
    run(model, tmp_path / "two", stop=lambda: next(asked) >= 3)
    resumed = run(model, tmp_path / "two")
    assert resumed.attempt == 2 and losses(resumed) == losses(unbroken)
    saved = sum(f.stat().st_size for f in (resumed.run_dir / "checkpoints" / "step_8" / "dcp").iterdir())
    assert saved < (model / "model.safetensors").stat().st_size * 3  # weights and two moments of all would be more
    other = run_config(model, model={"lora": {**LORA, "rank": 2}}, objective={"reference": "live"})
    (resumed.run_dir / "lock").unlink()
    resumed.run_dir.rename(setup.prepare(other, tmp_path / "two").run_dir)
    with pytest.raises(IdentityError, match=r"adapter was .*\"rank\":4.* and is .*\"rank\":2.*restore \[model\.lora\]"):
        run_training(other, tmp_path / "two")


@pytest.mark.parametrize(
    ("targets", "sentence"), [(("lm_head",), "names lm_head"), (("w_qkv",), "w_qkv.*layers: down_proj, gate_proj")]
)
def test_layers_that_cannot_have_one_are_refused(model: Path, targets: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        open_policy(ModelConfig(path=str(model), lora=LoraConfig(targets=targets)), CPU)


def test_merging_is_the_papers_sum() -> None:
    """W + (alpha / rank) * B A, by hand: 1 x 2 layer of rank 1, alpha 3."""
    weights = {
        "a.base_layer.weight": torch.tensor([[1.0, 2.0]]),
        "a.lora_A.default.weight": torch.tensor([[10.0, 20.0]]),
        "a.lora_B.default.weight": torch.tensor([[0.5]]),
        "norm.weight": torch.tensor([7.0]),
    }
    plain = adapter.merged(weights, LoraConfig(rank=1, alpha=3))
    assert {name: tensor.tolist() for name, tensor in plain.items()} == {
        "a.weight": [[16.0, 32.0]],
        "norm.weight": [7.0],
    }
