"""One attention function, registered with transformers as `pairledger`, with a kernel for each kind of device.

A model loaded with `attn_implementation=NAME` calls `attend` in every layer, and builds no mask: which keys a query
sees is said by the spans of the row alone. No mask function is registered under that name, because for one that gives
None transformers would still read the positions of the row, and have the host wait for the device. The spans reach the
layers as the keyword `packed` of the model's call, which transformers hands through. Cost: the scores that the spans
hold, never `total ** 2`.

Shapes: T tokens of the row, Hq query heads, Hk key and value heads, D width of a head.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from training.attention.packed import Packed
from training.errors import ModelError
from training.parallel.context import gather_keys
from training.parallel.device import kind_of
from training.parallel.ulysses import gather_heads, scatter_heads

NAME = "pairledger"

__all__ = ["NAME", "Packed", "attend", "register"]


def register() -> str:
    """Make `attend` known to transformers; gives the name to load a model with."""
    AttentionInterface.register(NAME, attend)
    return NAME


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed: Packed | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Attention of one packed row: `[1, Hq, T, D]`, `[1, Hk, T, D]` twice -> `[1, T, Hq, D]`.

    Of a row that ranks share, each gives and gets its own T tokens; inside, sequence is exchanged for heads.

    Raises:
        ModelError: names the layer's class and what it asks for that the kernels do not compute.
    """
    _refuse(module, dropout, asked)
    assert packed is not None, "a model with this attention is called with packed="
    assert query.shape[0] == 1 and query.shape[2] == packed.tokens, f"{tuple(query.shape)} is not one row of {packed}"
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    if sliding_window is not None and sliding_window >= packed.longest:
        sliding_window = None
    kernel = importlib.import_module(f"training.attention.{kind_of(q.device)}").attention
    q, k, v = scatter_heads(q, k, v, packed.world.ulysses)
    k, v = gather_keys(k, v, packed.world.cp)
    return gather_heads(kernel(q, k, v, packed, scale, sliding_window), packed.world.ulysses)[None], None


def _refuse(module: torch.nn.Module, dropout: float, asked: dict[str, Any]) -> None:
    name = type(module).__name__
    for argument, meaning in (
        ("softcap", "a cap on attention scores"),
        ("s_aux", "attention sinks"),
        ("position_bias", "a bias on attention scores"),
    ):
        if asked.get(argument) is not None:
            raise ModelError(f"{name} uses {meaning} ({argument}), which the attention kernels do not compute")
    if dropout:
        raise ModelError(f"{name} asks for attention dropout {dropout}; log-probabilities need dropout 0")
    if not getattr(module, "is_causal", True):
        raise ModelError(f"{name} attends to later tokens; only causal attention is served")
