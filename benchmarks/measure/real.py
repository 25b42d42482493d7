"""Real preference pairs, a tokenizer of 16,384 tokens made from them, and a Qwen3 model of 16.3M parameters.

Pairs are the two ShareGPT sets below PAIRLEDGER_TEST_DATA in ChatML; the tokenizer is Qwen3's, trained anew on them, so
that lengths are real and a model of a laptop's size has a vocabulary that fits it. Without that folder, lengths are
log-normal and ids random, and reports say so.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.data.tokenize import TokenizedPair

VOCABULARY = 16_384
MAX_TOKENS = 2048
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "max_position_embeddings": 65_536,
}


@dataclass(frozen=True, slots=True)
class Ground:
    """Tokenized pairs that fit 2048 tokens a side, in a fixed order, and folders of a policy and of its reference.

    The reference has other weights than the policy, so that losses are worth comparing.
    """

    where: str
    pairs: Sequence[TokenizedPair]
    policy: Path
    reference: Path


def ground(folder: Path) -> Ground:
    """Make the models and tokenize the pairs; a folder that holds them is read again."""
    if not (folder / "pairs.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        where, ids = _real(folder / "policy")
        for seed, name in enumerate(("policy", "reference")):
            write_model(folder / name, seed)
        (folder / "pairs.json").write_text(json.dumps([where, ids]), encoding="utf-8")
    where, ids = json.loads((folder / "pairs.json").read_text(encoding="utf-8"))
    pairs = [
        TokenizedPair(
            pair_id=f"pair1:{i:032x}",
            source="sharegpt",
            locator=f"{i}",
            prompt_ids=prompt,
            chosen_ids=chosen,
            rejected_ids=rejected,
        )
        for i, (prompt, chosen, rejected) in enumerate(ids)
    ]
    random.Random(0).shuffle(pairs)
    fitting = [p for p in pairs if len(p.prompt_ids) + max(len(p.chosen_ids), len(p.rejected_ids)) <= MAX_TOKENS]
    return Ground(where, fitting, folder / "policy", folder / "reference")


def write_model(folder: Path, seed: int, **changes: Any) -> Path:
    """A Qwen3 model with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, **changes})).save_pretrained(folder)
    return folder


def _real(folder: Path) -> tuple[str, list[list[list[int]]]]:
    data = os.environ.get("PAIRLEDGER_TEST_DATA")
    if not data:
        return "random ids of log-normal lengths (PAIRLEDGER_TEST_DATA is not set)", _random()
    from transformers import AutoTokenizer

    rows: list[dict[str, Any]] = []
    for name in ("sharegpt_dpo_en.json", "sharegpt_dpo_zh.json"):
        rows += json.loads(Path(data, "data", name).read_text(encoding="utf-8"))
    texts = [t["value"] for row in rows for t in (*row["conversations"], row["chosen"], row["rejected"])]
    qwen3: Any = AutoTokenizer.from_pretrained(f"{data}/tokenizers/qwen3")
    tokenizer = qwen3.train_new_from_iterator(texts, VOCABULARY - 64)  # room for what is added to any size
    assert len(tokenizer) <= VOCABULARY, len(tokenizer)
    tokenizer.save_pretrained(folder)
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    found: list[list[list[int]]] = []
    for row in rows:
        turns = [f"<|im_start|>{roles[t['from']]}\n{t['value']}<|im_end|>\n" for t in row["conversations"]]
        prompt = "".join(turns) + "<|im_start|>assistant\n"
        sides = [row[side]["value"] + "<|im_end|>" for side in ("chosen", "rejected")]
        found.append([tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, *sides)])
    return "sharegpt_dpo_en and _zh in ChatML, a byte-level BPE of 16,384 tokens made from them", found


def _random() -> list[list[list[int]]]:
    rng = np.random.default_rng(0)
    columns = [rng.lognormal(np.log(m), s, 600) for m, s in ((150, 1.1), (220, 0.8), (210, 0.8))]
    lengths = np.clip(np.stack(columns, 1), 1, MAX_TOKENS // 2 - 1).astype(int)
    return [[rng.integers(0, VOCABULARY, n).tolist() for n in triple] for triple in lengths]
