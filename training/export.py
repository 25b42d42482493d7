"""Export: the trained policy as a folder that plain transformers loads, with its tokenizer and where it came from.

Weights are safetensors in the chosen type. The folder appears complete or not at all. The model card carries the
lineage: datasets, sources with their counts and licences, objective, and how many tokens were learned from.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM

from training.adapter import alone, described, merged
from training.config import LoraConfig
from training.model import Policy

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """What a model card says of a run."""

    run_id: str
    base: str
    identity: Mapping[str, str]
    steps: int
    pairs_by_source: Mapping[str, int]
    tokens: Mapping[str, int]
    objective: Mapping[str, Any]


def whole_weights(policy: Policy) -> Mapping[str, Any]:
    """A policy's weights by name, tied ones once; of a sharded one on the first rank's host alone, by all ranks."""
    module = policy.module
    if policy.root is None:
        weights = module.state_dict()
    else:
        weights = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    once = {name for name, _ in module.named_parameters()}
    tied = {name for name, _ in module.named_parameters(remove_duplicate=False)} - once
    return {name: tensor for name, tensor in weights.items() if name not in tied}


def export(
    weights: Mapping[str, Any],
    folder: Path,
    *,
    source: Path,
    tokenizer: Path,
    dtype: str,
    lineage: Lineage,
    lora: LoraConfig | None = None,
) -> Path:
    """Write a model; `source` is the folder it was loaded from, `tokenizer` the one its datasets were made with.

    `dtype` is `source`, `bf16` or `fp32`. An adapter is merged into the model, or written alone as peft's folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        kind: Any = TYPES.get(dtype) or config.dtype or torch.float32
        if lora is not None and lora.export == "adapter":
            save_file(_cast(alone(weights), kind), staging / "adapter_model.safetensors", metadata={"format": "pt"})
            described_config = json.dumps(described(lora, str(source)), indent=2)
            (staging / "adapter_config.json").write_text(described_config + "\n", encoding="utf-8")
        else:
            with torch.device("meta"):
                skeleton = AutoModelForCausalLM.from_config(config, dtype=kind)
            whole = weights if lora is None else merged(weights, lora)
            skeleton.save_pretrained(staging, state_dict=_cast(whole, kind))
        for name in TOKENIZER_FILES:
            for place in (tokenizer, source):
                if (place / name).is_file() and not (staging / name).exists():
                    shutil.copyfile(place / name, staging / name)
        (staging / "README.md").write_text(card(lineage), encoding="utf-8")
        staging.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _cast(weights: Mapping[str, Any], kind: torch.dtype) -> dict[str, Any]:
    return {name: tensor.detach().to("cpu", kind).contiguous() for name, tensor in weights.items()}


def card(lineage: Lineage) -> str:
    """The model card."""
    sources = "\n".join(f"| {name} | {pairs} |" for name, pairs in sorted(lineage.pairs_by_source.items()))
    tokens = "\n".join(f"| {name} | {count} |" for name, count in lineage.tokens.items())
    identity = "\n".join(f"| {name} | `{value}` |" for name, value in lineage.identity.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [preference-optimization, pairledger]
---
# {lineage.run_id}

Trained by PairLedger for {lineage.steps} steps from `{lineage.base}`.

| source | pairs shown |
|---|---|
{sources}

| tokens | count |
|---|---|
{tokens}

Objective: `{json.dumps(dict(lineage.objective), sort_keys=True)}`

| identity | |
|---|---|
{identity}
"""
