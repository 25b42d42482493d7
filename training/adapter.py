"""LoRA: low-rank matrices beside a frozen model's linear layers, made by peft inside the model itself.

Hu et al. 2021, arXiv:2106.09685: W x becomes W x + (alpha / rank) * B A x. A starts random, by the plan's seed and so
alike on every rank, and B at 0: a policy with a fresh adapter is its reference, and with the adapter's scale at 0 it
stays so, for a live reference that costs no second model.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from training.config import LoraConfig
from training.errors import ModelError

ADAPTER = "default"


def inject(module: PreTrainedModel, lora: LoraConfig, seed: int) -> None:
    """Put an adapter into a model, in place; everything else is frozen.

    Raises:
        ModelError: no layer has a name that `lora.targets` gives, or the head or the embeddings have.
    """
    unserved = {"lm_head", "embed_tokens", "all"} & set(lora.targets)
    if unserved:
        raise ModelError(f"model.lora.targets names {', '.join(sorted(unserved))}; the head and embeddings stay frozen")
    try:
        inject_adapter_in_model(peft_config(lora), module, ADAPTER)
    except ValueError as error:
        names = sorted({name.rpartition(".")[2] for name, m in module.named_modules() if isinstance(m, nn.Linear)})
        raise ModelError(f"model.lora.targets = {list(lora.targets)}: {error}; layers: {', '.join(names)}") from None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in _layers(module):  # again, in this order, also where the model around it is empty yet
            layer.lora_A.to_empty(device="cpu")
            layer.lora_B.to_empty(device="cpu")
            layer.reset_lora_parameters(ADAPTER, True)


def peft_config(lora: LoraConfig) -> PeftLoraConfig:
    """The adapter as peft names it."""
    targets = "all-linear" if lora.targets == ("all-linear",) else list(lora.targets)
    return PeftLoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")


@contextmanager
def off(module: nn.Module) -> Generator[None]:
    """The model as it was before it had an adapter: every scale is 0 meanwhile."""
    layers = _layers(module)
    for layer in layers:
        layer.set_scale(ADAPTER, 0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1)


def _layers(module: nn.Module) -> list[LoraLayer]:
    return [layer for layer in module.modules() if isinstance(layer, LoraLayer)]


def merged(weights: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """A plain model's weights: W + (alpha / rank) * B A where a layer has an adapter, under the names it had."""
    plain: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if ".lora_" in name:
            continue
        if ".base_layer." not in name:
            plain[name] = tensor
            continue
        layer, kind = name.split(".base_layer.")
        low = [weights[f"{layer}.lora_{part}.{ADAPTER}.weight"] for part in "BA"] if kind == "weight" else None
        plain[f"{layer}.{kind}"] = tensor if low is None else tensor + lora.alpha / lora.rank * low[0] @ low[1]
    return plain


def alone(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapter's own weights, under the names that peft loads."""
    return {
        "base_model.model." + name.replace(f".{ADAPTER}.", "."): tensor
        for name, tensor in weights.items()
        if ".lora_" in name
    }


def described(lora: LoraConfig, base: str) -> dict[str, Any]:
    """What peft's `adapter_config.json` says."""
    config = peft_config(lora)
    config.base_model_name_or_path = base
    config.inference_mode = True
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
