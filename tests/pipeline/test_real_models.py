"""Real pairs, a tokenizer in use, four families of models, two processes: five steps with validation."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pipeline.cli import main
from tests.pipeline.test_ranks import finished, launched, lines
from training.config import DataConfig, PlanConfig
from training.data.plan import make_plan
from training.data.shards import open_dataset
from training.ledger.validation import read_validation

DATA = os.environ.get("PAIRLEDGER_TEST_DATA", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not DATA, reason="set PAIRLEDGER_TEST_DATA to a folder with data/sharegpt_dpo_en.json and tokenizers/qwen3"
    ),
]
SIZES: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
}
MODELS: dict[str, tuple[type[Any], type[Any], dict[str, Any], str]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}, "ulysses"),
    "llama": (LlamaForCausalLM, LlamaConfig, {}, "cp"),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"sliding_window": 64}, "dp_shard"),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "dp_shard",
    ),
}
RUN = """
[data]
datasets = ["prepared"]
held_out_share = 0.2
[plan]
pairs_per_step = {pairs}
[model]
path = "{model}"
[optimizer]
lr = 1e-3
[save]
validate_steps = 2
[devices]
kind = "cpu"
processes = 2
{degree} = 2
"""
STEPS = 5


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The shortest forty conversations, prepared."""
    place = tmp_path_factory.mktemp("real")
    rows = json.loads((Path(DATA) / "data" / "sharegpt_dpo_en.json").read_text(encoding="utf-8"))
    rows = sorted(rows, key=lambda row: len(json.dumps(row)))[:40]
    (place / "pairs.json").write_text(json.dumps(rows), encoding="utf-8")
    words = f"prepare {place}/pairs.json --tokenizer {DATA}/tokenizers/qwen3 --out {place}/prepared --workers 1 --json"
    assert main(words.split()) == 0
    return place


@pytest.mark.parametrize("family", MODELS)
def test_real_pairs_train_on_two_processes(place: Path, family: str) -> None:
    model, config, more, degree = MODELS[family]
    model(config(**SIZES, **more)).save_pretrained(place / f"{family}-model")
    dataset = open_dataset(place / "prepared")
    train = len(make_plan([dataset], DataConfig(held_out_share=0.2), PlanConfig()).train)
    assert train >= 20
    toml = place / f"{family}.toml"
    toml.write_text(RUN.format(pairs=-(-train // STEPS), model=f"{family}-model", degree=degree))
    code, said = finished(launched(toml, place / family), seconds=600)
    assert code == 0, said
    (run,) = (place / family).glob("runs/*")
    steps = lines(place, family)
    with pa.memory_map(str(run / "predicted.arrow")) as source:
        predicted = pa.ipc.open_file(source).read_all()
    assert len(steps) == STEPS == len(predicted)
    assert steps[0].loss == pytest.approx(0.693147, abs=1e-4)
    counted = [step.counters and step.counters.source_tokens for step in steps]
    assert counted == predicted["source_tokens"].to_pylist() and all(counted)
    judged = read_validation(next(run.glob("attempts/*/validation.jsonl")))
    assert {row.step for row in judged} == {2, 4, 5} and all(row.pairs == judged[0].pairs > 0 for row in judged)
    assert list(run.glob("export/model*.safetensors"))
