"""A kernel that says one thing wrong is caught: by what the strict stand-in refuses, or by its numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.attention.mutations import FUSION, FUSION_WINDOW, VARLEN, Mutation
from tests.training.attention.operators import OperatorError, fusion_attention, varlen_attention
from tests.training.attention.test_kernels import dense, packed, qkv
from training.attention import gpu, npu

SCALE = 0.3
FAR = 0.05
"""Relative distance from which a result is another one."""

Attention = Callable[..., Tensor]


def mutated(operator: Callable[..., Any], mutation: Mutation | None) -> Callable[..., Any]:
    """An operator that is called wrongly."""

    def call(*args: Any, **named: Any) -> Any:
        arguments, options = mutation[0](list(args), named) if mutation else (args, named)
        return operator(*arguments, **options)

    return call


def results(attention: Attention, operands: Sequence[Tensor], window: int | None) -> list[Tensor]:
    """Output and gradients of a row of three pairs and its tail."""
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    out = attention(*leaves, packed(), SCALE, window)
    (out.float() * torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)).sum().backward()
    return [out.detach().float().cpu(), *(x.grad.float().cpu() for x in leaves if x.grad is not None)]


def distance(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Largest relative L2 distance of output and gradients."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))


def judge(attention: Attention, operands: Sequence[Tensor], window: int | None, said: str | None) -> None:
    """A right call is the definition; a wrong one is refused with these words, or far from it."""
    want = results(dense, [x.detach().float().cpu() for x in operands], window)
    if said is None:
        assert distance(results(attention, operands, window), want) > FAR
        return
    with pytest.raises((OperatorError, TypeError), match=said):
        results(attention, operands, window)


@pytest.mark.parametrize("name", FUSION)
def test_a_wrong_call_of_the_fused_operator_is_caught(name: str) -> None:
    """case: npu-mask-inverted, tnd-cumulative, tnd-tail-not-covered"""
    operator = mutated(fusion_attention, FUSION[name])
    judge(lambda *args: npu.attention(*args, operator=operator), qkv(packed().total), None, FUSION[name][1])


@pytest.mark.parametrize("name", FUSION_WINDOW)
def test_a_wrong_window_of_the_fused_operator_is_caught(name: str) -> None:
    operator = mutated(fusion_attention, FUSION_WINDOW[name])
    judge(lambda *args: npu.attention(*args, operator=operator), qkv(packed().total), 3, FUSION_WINDOW[name][1])


@pytest.mark.parametrize("name", VARLEN)
def test_a_wrong_call_of_the_flash_operator_is_caught(name: str) -> None:
    operator = mutated(varlen_attention, VARLEN[name])
    half = [x.detach().bfloat16() for x in qkv(packed().total)]
    judge(lambda *args: gpu.attention(*args, operator=operator), half, None, VARLEN[name][1])


@pytest.mark.parametrize("window", [None, 3])
def test_a_right_call_is_the_definition(window: int | None) -> None:
    """The guard of the others: unchanged, both kernels are as near to the definition as their precision allows."""
    exact = [x.detach() for x in qkv(packed().total)]
    for attention, operator, operands, near in (
        (npu.attention, fusion_attention, exact, 1e-6),
        (gpu.attention, varlen_attention, [x.bfloat16() for x in exact], 2**-7),
    ):
        row: Attention = lambda *args, a=attention, o=operator: a(*args, operator=mutated(o, None))  # noqa: E731
        want = results(dense, [x.float() for x in operands], window)
        assert distance(results(row, operands, window), want) < near
