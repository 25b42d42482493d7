"""A prepared dataset in memory, and a run over it: what the trainer needs, without files of the data room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from training.config import RunConfig
from training.data.fingerprint import fp
from training.data.tokenize import TokenizedPair

VOCABULARY = 61


def pair(number: int, prompt: Sequence[int], chosen: Sequence[int], rejected: Sequence[int]) -> TokenizedPair:
    return TokenizedPair(
        pair_id=f"pair1:{number:032x}",
        source="even" if number % 2 == 0 else "odd",
        locator=f"numbers.jsonl:{number + 1}",
        prompt_ids=list(prompt),
        chosen_ids=list(chosen),
        rejected_ids=list(rejected),
    )


def larger_number(count: int, seed: int = 0) -> list[TokenizedPair]:
    """Pairs that prefer the larger of two numbers: something a tiny model can learn."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        low, high = sorted(rng.choice(50, 2, replace=False).tolist())
        prompt = [high, low, 55] if rng.random() < 0.5 else [low, high, 55]
        made.append(pair(number, [56] * int(rng.integers(1, 5)) + prompt, [57, high, 60], [57, low, 58, 60]))
    return made


@dataclass(frozen=True)
class MemoryDataset:
    """Pairs as the one shard of a dataset."""

    pairs: tuple[TokenizedPair, ...]
    path: Path = Path("memory")
    max_tokens: int | None = 32

    @property
    def fingerprint(self) -> str:
        return fp("ds", [[p.prompt_ids, p.chosen_ids, p.rejected_ids] for p in self.pairs])

    @property
    def inputs(self) -> dict[str, str]:
        return {"tokenizer": "tok1:0", "template": "tpl1:0", "recipe": "rec1:0"}

    @property
    def manifest(self) -> Any:
        return SimpleNamespace(vocab_size=VOCABULARY, tokenizer_path="nowhere")

    def take(self, shard: int, row: int) -> TokenizedPair:
        assert shard == 0
        return self.pairs[row]

    def columns(self) -> Any:
        def lengths(name: str) -> np.ndarray:
            return np.array([len(getattr(p, name)) for p in self.pairs], np.int32)

        return SimpleNamespace(
            shard=np.zeros(len(self.pairs), np.int32),
            row=np.arange(len(self.pairs), dtype=np.int32),
            prompt=lengths("prompt_ids"),
            chosen=lengths("chosen_ids"),
            rejected=lengths("rejected_ids"),
            chosen_loss=lengths("chosen_ids"),
            rejected_loss=lengths("rejected_ids"),
            source_code=np.array([int(p.source == "odd") for p in self.pairs], np.int32),
            sources=("even", "odd"),
            pair_id=pa.array([p.pair_id for p in self.pairs]),
            locator=pa.array([p.locator for p in self.pairs]),
            prompt_key=np.array([hash(tuple(p.prompt_ids)) % 2**63 for p in self.pairs], np.uint64),
        )


def write_model(folder: Path, **settings: Any) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "initializer_range": 0.1,
            "tie_word_embeddings": True,
            **settings,
        }
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def run_config(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    values: dict[str, dict[str, Any]] = {
        "data": {"datasets": ("memory",)},
        "plan": {"pairs_per_step": 8, "epochs": 2, "pack_tokens": 48},
        "model": {"path": str(folder)},
        "optimizer": {"lr": 3e-3, "weight_decay": 0.01, "warmup_steps": 2, "schedule": "linear"},
        "devices": {"kind": "cpu"},
        "save": {"steps": 3},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return RunConfig.model_validate(values)
