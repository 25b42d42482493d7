"""Packed attention forward and backward through torch_npu's own front end and autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.attention.mutations import FUSION, FUSION_WINDOW
from tests.training.attention.operators import OperatorError
from tests.training.attention.test_kernels import dense, packed, qkv
from tests.training.attention.test_operators import FAR, SCALE, distance, mutated, results
from training.attention import Packed, npu
from training.geometry import PairShape, Span, lay_out
from training.sharding import place


def on_device(operands: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().to("npu") for x in operands]


def definition(window: int | None) -> list[Tensor]:
    return results(dense, qkv(packed().total), window)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_a_packed_row_is_the_definition_forward_and_backward(window: int | None) -> None:
    """case: infer-op-in-training, tnd-cumulative"""
    from tests.npu.emulated import counted

    with counted() as calls:
        got = results(npu.attention, on_device(qkv(packed().total)), window)
    assert calls["npu_fusion_attention"] == calls["npu_fusion_attention_grad"] == 1
    assert distance(got[:1], definition(window)[:1]) < 1e-6
    if window != 1:  # with one key its weight is 1 whatever the query, whose gradient is then 0
        assert distance(got, definition(window)) < 1e-6


@pytest.mark.parametrize("window", [None, 5])
def test_half_precision_is_the_definition_to_its_own(window: int | None) -> None:
    half = [x.detach().bfloat16() for x in qkv(packed().total)]
    want = results(dense, [x.float() for x in half], window)
    assert distance(results(npu.attention, on_device(half), window), want) < 2**-6


MUTATIONS = [(name, m, None) for name, m in FUSION.items()] + [(name, m, 3) for name, m in FUSION_WINDOW.items()]


@pytest.mark.parametrize(("name", "mutation", "window"), MUTATIONS, ids=[name for name, _, _ in MUTATIONS])
def test_a_wrong_call_is_caught(monkeypatch: pytest.MonkeyPatch, name: str, mutation: Any, window: int | None) -> None:
    """case: npu-mask-inverted, tnd-cumulative, tnd-tail-not-covered

    torch_npu's own front end refuses what is no list of integers; the operator behind it, the rest.
    """
    import torch_npu

    operator = torch_npu.npu_fusion_attention
    monkeypatch.setattr(torch_npu, "npu_fusion_attention", mutated(operator, mutation))
    operands = on_device(qkv(packed().total))
    if mutation[1] is None:
        assert distance(results(npu.attention, operands, window), definition(window)) > FAR
        return
    with pytest.raises((OperatorError, TypeError, RuntimeError)) as caught:
        results(npu.attention, operands, window)
    if isinstance(caught.value, OperatorError):
        caught.match(mutation[1])


def test_a_later_token_changes_nothing_before_it() -> None:
    """case: npu-mask-inverted"""
    row = Packed([Span(0, 3, ((0, 3),))], 3)
    q, k, v = on_device(qkv(3))
    before = npu.attention(q, k, v, row, SCALE, None).cpu()
    k[2] += 1
    v[2] += 1
    after = npu.attention(q, k, v, row, SCALE, None).cpu()
    assert torch.equal(before[:2], after[:2]) and not torch.equal(before[2], after[2])


def test_nan_in_the_tail_reaches_no_result_and_no_gradient() -> None:
    """case: tnd-tail-not-covered"""
    row = Packed([Span(0, 3, ((0, 3),)), Span(3, 5, ((3, 5),)), Span(5, 8, ((5, 8),))], 8)
    assert npu.calls(row, None)[0].options["actual_seq_qlen"] == [3, 5, 8]
    operands = qkv(8)
    want = dense(*(x[:5] for x in operands), Packed(row.spans[:2], 5), SCALE, None)
    spoilt = on_device(operands)
    for x in spoilt:
        x[5:] = float("nan")
        x.requires_grad_()
    out = npu.attention(*spoilt, row, SCALE, None)
    out[:5].sum().backward()
    torch.testing.assert_close(out[:5].detach().cpu(), want.detach())
    assert all(x.grad is not None and x.grad[:5].cpu().isfinite().all() for x in spoilt)


def test_borders_of_a_padded_row_over_context_ranks() -> None:
    """case: padded-seqlens-none: lengths 4 and 3 over cp 2 are borders 0, 4, 7, 8, for every kernel alike."""
    pack = lay_out([PairShape(prompt=1, chosen=3, rejected=3)], multiple=4)
    assert [span.q0 for span in pack.spans] + [pack.total] == [0, 4, 7, 8]
    assert npu.calls(Packed.of(pack), None)[0].options["actual_seq_qlen"] == [4, 7, 8]
    assert Packed.of(pack).longest == 4
    assert sum(len(mine) for mine in place(pack, cp=2).chunks) == 4


def test_more_segments_than_a_call_takes_are_several_calls() -> None:
    from tests.npu.emulated import counted

    row = packed([(1, 1, 2)] * 700, multiple=1)
    operands = qkv(row.total)
    with counted() as calls:
        got = npu.attention(*on_device(operands), row, SCALE, None).cpu()
    assert calls["npu_fusion_attention"] == 2
    torch.testing.assert_close(got, dense(*(x.detach() for x in operands), row, SCALE, None), rtol=1e-5, atol=1e-6)


def test_what_a_device_cannot_do_fails_here_too() -> None:
    with pytest.raises(TypeError, match="float64"):
        torch.ones(2, device="npu") * torch.ones(2, dtype=torch.float64, device="npu")
