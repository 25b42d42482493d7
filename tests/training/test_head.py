"""The chunked head against plain log-softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from training.head import Head, row_logps


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.25, None), (1.0, 2.0), (3.0, 1.5)])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_and_gradients_equal_full_logits(chunk: int, scale: float, cap: float | None, biased: bool) -> None:
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
        return row_logps(h, target, Head(weight=w, bias=b, scale=scale, cap=cap), chunk)

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
