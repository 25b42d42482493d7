"""The chunked head against plain log-softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from training import head as head_module
from training.head import Head, row_logps


@pytest.mark.parametrize(("chunk", "kept"), [(1, 0), (3, 0), (3, 5), (3, 7), (100, 7)])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.25, None), (1.0, 2.0), (3.0, 1.5)])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_and_gradients_equal_full_logits(
    chunk: int, kept: int, scale: float, cap: float | None, biased: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*s, generator=generator, dtype=torch.float64).float() for s in ((7, 5), (11, 5), (11,))
    )
    target = torch.tensor([3, 3, 0, 10, 5, 6, 7])
    upstream = torch.randn(7, generator=generator)

    def full(h: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        logits = (h @ w.t() + (0 if b is None else b)) * scale
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return logits.log_softmax(-1).gather(1, target[:, None])[:, 0]

    def chunked(h: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return row_logps(h, target, Head(weight=w, bias=b, scale=scale, cap=cap), chunk=chunk, kept_bytes=kept * 44)

    results = []
    for function in (full, chunked):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        out = function(leaves[0], leaves[1], leaves[2] if biased else None)
        (out * upstream).sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves[: 3 if biased else 2])])
    for got, want in zip(*results[::-1], strict=True):
        assert want.abs().max() > 0.01
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_half_precision_rows_sum_the_vocabulary_in_fp32() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 16), torch.randn(4096, 16) * 0.1
    head = Head(weight=weight, bias=None, scale=1.0, cap=None)
    target = torch.arange(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = row_logps(hidden, target, head)
    assert got.dtype == torch.float32
    rounded = hidden.bfloat16() @ weight.bfloat16().t()
    want = rounded.float().log_softmax(-1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_a_second_backward_pass_gives_the_same_though_the_first_used_up_what_was_kept() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 16, requires_grad=True), torch.randn(32, 16, requires_grad=True)
    rows = row_logps(hidden, torch.arange(4), Head(weight=weight, bias=None, scale=1.0, cap=None))
    first = torch.autograd.grad(rows.sum(), (hidden, weight), retain_graph=True)
    for got, want in zip(torch.autograd.grad(rows.sum(), (hidden, weight)), first, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_what_stays_for_the_backward_pass_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[int] = []
    logits = head_module._logits

    def counted(hidden: Tensor, *rest: Any) -> Any:
        products.append(len(hidden))
        return logits(hidden, *rest)

    monkeypatch.setattr(head_module, "_logits", counted)
    hidden, weight = torch.randn(10, 16, requires_grad=True), torch.randn(32, 16, requires_grad=True)
    head = Head(weight=weight, bias=None, scale=1.0, cap=None)
    rows = row_logps(hidden, torch.arange(10), head, chunk=3, kept_bytes=7 * 32 * 4)
    assert products == [3, 3, 3, 1]
    rows.sum().backward()
    assert products[4:] == [3, 1]  # two chunks of three rows were kept: a third does not fit in seven
    with torch.no_grad():
        assert row_logps(hidden, torch.arange(10), head).grad_fn is None
