"""An exported model is a plain Hugging Face folder that scores as the policy did and says where it came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.training.memory import larger_number, write_model
from training.config import ModelConfig
from training.export import Lineage, export, whole_weights
from training.model import Policy
from training.parallel.device import pick
from training.scores import batch_of, open_policy, side_logps

LINEAGE = Lineage(
    run_id="run-abc",
    base="models/base",
    identity={"plan": "plan1:a", "tokenizer": "tok1:b"},
    steps=7,
    pairs_by_source={"forum": 40, "notes": 2},
    tokens={"supervised tokens": 1234},
    objective={"beta": 0.1, "losses": {"sigmoid": 1.0}},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("export") / "model")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


@pytest.fixture
def policy(model: Path) -> Policy:
    policy = open_policy(ModelConfig(path=str(model)), pick("cpu"))
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(0.01)
    return policy


def test_plain_transformers_loads_it_and_scores_the_same(policy: Policy, model: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text('{"own": 1}', encoding="utf-8")
    (tokenizer / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    folder = tmp_path / "export"
    for _ in range(2):  # an older export is replaced
        export(whole_weights(policy), folder, source=model, tokenizer=tokenizer, dtype="source", lineage=LINEAGE)
    pair = larger_number(1)[0]
    _, batch = batch_of([pair], layout="shared", device=torch.device("cpu"))
    with torch.no_grad():
        ours = side_logps(policy, batch)
        plain = AutoModelForCausalLM.from_pretrained(folder)
        ids = torch.tensor([pair.prompt_ids + pair.chosen_ids])
        logits = plain(ids).logits[0, len(pair.prompt_ids) - 1 : -1].log_softmax(-1)
    theirs = logits.gather(1, torch.tensor(pair.chosen_ids)[:, None]).sum()
    torch.testing.assert_close(theirs, ours[0], rtol=1e-5, atol=0)
    assert json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")) == {"own": 1}
    assert (folder / "chat_template.jinja").exists()
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert settings["model_type"] == "qwen3" and "pairledger" not in json.dumps(settings)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize(("dtype", "kind"), [("source", "float32"), ("bf16", "bfloat16"), ("fp32", "float32")])
def test_weights_have_the_type_that_was_asked_for(
    policy: Policy, model: Path, tmp_path: Path, dtype: str, kind: str
) -> None:
    export(whole_weights(policy), tmp_path / "e", source=model, tokenizer=model, dtype=dtype, lineage=LINEAGE)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "e", dtype="auto")
    assert {str(p.dtype) for p in loaded.parameters()} == {f"torch.{kind}"}
    assert next(policy.module.parameters()).dtype == torch.float32


def test_the_card_carries_the_lineage(policy: Policy, model: Path, tmp_path: Path) -> None:
    export(whole_weights(policy), tmp_path / "e", source=model, tokenizer=model, dtype="bf16", lineage=LINEAGE)
    card = (tmp_path / "e" / "README.md").read_text(encoding="utf-8")
    for words in ("run-abc", "| forum | 40 |", "plan1:a", "tok1:b", "models/base", "1234", '"beta": 0.1', "7 steps"):
        assert words in card
