"""A project of three small drops: generated pairs, a tiny tokenizer, a tiny model."""

import json
import random
from pathlib import Path

from tests.training.data import tiny
from training.config import ProjectConfig, load_project

WEEK = "2026-11-09"
DROPS = ("2026-11-10|numbers", "2026-11-11|numbers", "2026-11-11|org/words.v2")
TEXT = """
store = "store"
[sources.numbers]
files = ["in/{drop}.jsonl"]
day = "2026-11-10"
[sources."org/words.v2"]
files = ["words.jsonl"]
day = "2026-11-11"
[tokenizer]
path = "tokenizer"
[limits]
max_tokens = 64
[data]
held_out_share = 0.2
[plan]
pairs_per_step = 8
[model]
path = "model"
[devices]
kind = "cpu"
[save]
steps = 2
"""


def write_rows(path: Path, count: int, seed: int) -> None:
    """Pairs that prefer the larger number."""
    rng = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for _ in range(count):
        low, high = sorted(rng.sample(range(100), 2))
        rows.append({"prompt": f"{high} {low}?", "chosen": f"The {high}", "rejected": f"The {low}"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_project(folder: Path, *, extra: str = "", model: bool = False) -> ProjectConfig:
    """Write sources, tokenizer, and where asked the model, and read the configuration back."""
    write_rows(folder / "in" / "2026-11-10.jsonl", 24, 1)
    write_rows(folder / "in" / "2026-11-11.jsonl", 16, 2)
    write_rows(folder / "words.jsonl", 12, 3)
    with (folder / "words.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"prompt": "1 2?", "chosen": "same", "rejected": "same"}\n{"broken\n')
    tokenizer = tiny.byte_level()
    tiny.write(folder / "tokenizer", tokenizer, tiny.CHATML)
    if model:
        _write_model(folder / "model", tokenizer.get_vocab_size())
    (folder / "pairledger.toml").write_text(TEXT + extra, encoding="utf-8")
    return load_project(folder / "pairledger.toml")


def _write_model(folder: Path, vocabulary: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
