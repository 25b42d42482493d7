"""What each kernel tells its operator of a row, and that strict stand-ins for operators compute the same from it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from tests.training.attention.operators import fusion_attention, varlen_attention
from training.attention import Packed, attend, cpu, gpu, npu
from training.attention.packed import borders, ends, keep_mask
from training.errors import ModelError
from training.geometry import PairShape, Span, lay_out


def packed(lengths: Sequence[tuple[int, int, int]] = ((3, 2, 4), (5, 1, 6), (1, 1, 1)), multiple: int = 8) -> Packed:
    shapes = [PairShape(prompt=p, chosen=c, rejected=r) for p, c, r in lengths]
    return Packed.of(lay_out(shapes, multiple=multiple))


def qkv(total: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(total, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)]


def dense(q: Tensor, k: Tensor, v: Tensor, row: Packed, scale: float, window: int | None) -> Tensor:
    """Attention by the definition: for every query a list of the keys it sees."""
    out = []
    for span in row.spans:
        keys = [i for a, b in span.keys for i in range(a, b)]
        for query in range(span.q0, span.q1):
            seen = keys[: len(keys) - (span.q1 - 1 - query)][-(window or len(keys)) :]
            scores = torch.einsum("gjd,sgd->gjs", q[query].unflatten(0, (2, 2)), k[seen]) * scale
            out.append(torch.einsum("gjs,sgd->gjd", scores.softmax(-1), v[seen]).flatten(0, 1))
    return torch.stack(out)


KERNELS = {
    "cpu": cpu.attention,
    "npu": partial(npu.attention, operator=fusion_attention),
    "gpu": partial(gpu.attention, operator=partial(varlen_attention, half=False)),
}


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_computes_the_definition_forward_and_backward(kernel: str, window: int | None) -> None:
    """case: tnd-cumulative, infer-op-in-training"""
    row = packed()
    results = []
    for function in (KERNELS[kernel], dense):
        q, k, v = qkv(row.total)
        out = function(q, k, v, row, 0.3, window)
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        results.append([out.detach(), *(x.grad for x in (q, k, v))])
    for got, want in zip(*results, strict=True):
        assert want.abs().max() > 0 or window == 1  # one key: its weight is 1, whatever the query
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_borders_come_in_two_conventions() -> None:
    """case: tnd-cumulative"""
    assert ends([3, 2, 4]) == [3, 5, 9]
    assert borders([3, 2, 4]) == [0, 3, 5, 9]
    for bad in ([], [3, 0, 4]):
        with pytest.raises(AssertionError):
            ends(bad)


def test_the_tail_is_a_segment_of_its_own_and_reaches_nothing() -> None:
    """case: tnd-tail-not-covered"""
    row = Packed([Span(0, 3, ((0, 3),)), Span(3, 5, ((3, 5),)), Span(5, 8, ((5, 8),))], 8)
    assert npu.calls(row, None)[0].options["actual_seq_qlen"] == [3, 5, 8]
    q, k, v = qkv(8)
    clean = [x[:5].detach() for x in (q, k, v)]
    want = cpu.attention(*clean, Packed(row.spans[:2], 5), 0.3, None)
    for kernel in KERNELS.values():
        spoilt = [x.detach().clone() for x in (q, k, v)]
        for x in spoilt:
            x[5:] = float("nan")
            x.requires_grad_()
        out = kernel(*spoilt, row, 0.3, None)
        torch.testing.assert_close(out[:5], want)
        out[:5].sum().backward()
        assert all(x.grad is not None and x.grad[:5].isfinite().all() for x in spoilt)


def test_true_hides_on_the_npu_and_keeps_in_torch() -> None:
    """case: npu-mask-inverted"""
    keep = [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert keep_mask(3, 3).int().tolist() == keep
    assert npu.hide_mask()[:3, :3].int().tolist() == [[1 - seen for seen in line] for line in keep]
    row = Packed([Span(0, 3, ((0, 3),))], 3)
    for kernel in KERNELS.values():
        q, k, v = (x.detach() for x in qkv(3))
        before = kernel(q, k, v, row, 0.3, None)
        k[2] += 1
        v[2] += 1
        after = kernel(q, k, v, row, 0.3, None)
        assert torch.equal(before[:2], after[:2]) and not torch.equal(before[2], after[2])


def test_a_row_with_more_segments_than_a_call_takes_is_several_calls() -> None:
    row = packed([(1, 1, 2)] * 700, multiple=1)
    parts = npu.calls(row, None)
    assert [len(part.options["actual_seq_qlen"]) for part in parts] == [1024, 376]
    q, k, v = (x.detach() for x in qkv(row.total))
    torch.testing.assert_close(
        npu.attention(q, k, v, row, 0.3, None, operator=fusion_attention), cpu.attention(q, k, v, row, 0.3, None)
    )


def test_flash_takes_half_precision_in_one_call_and_the_rest_goes_by_span(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def counted(query: Tensor, *rest: Any, **told: Any) -> Tensor:
        calls.append(tuple(query.shape))
        return varlen_attention(query, *rest, **told)

    monkeypatch.setattr(varlen, "varlen_attn", counted)
    row = packed()
    exact = [x.detach() for x in qkv(row.total)]
    half = [x.bfloat16() for x in exact]
    got = gpu.attention(*half, row, 0.3, None)
    assert calls == [(row.total, 4, 8)] and got.dtype == torch.bfloat16
    want = dense(*(x.float() for x in half), row, 0.3, None)
    torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=2**-8)
    gpu.attention(*exact, row, 0.3, None)  # fp32
    gpu.attention(*(x[..., :6] for x in half), row, 0.3, None)  # a width that is no multiple of 8
    gpu.attention(half[0], half[1], half[2][..., :4], row, 0.3, None)  # values of another width
    assert len(calls) == 1


def test_a_window_is_counted_with_the_query_here_and_without_it_in_kernels() -> None:
    row, host = packed(), torch.device("cpu")
    assert gpu.arguments(row, 3, host).window == (2, 0) and gpu.arguments(row, None, host).window == (-1, 0)
    options = npu.calls(row, 3)[0].options
    assert (options["sparse_mode"], options["pre_tockens"], options["next_tockens"]) == (4, 2, 0)


@pytest.mark.parametrize(
    ("asked", "said"), [({"softcap": 50.0}, "cap"), ({"s_aux": torch.zeros(4)}, "sinks"), ({"dropout": 0.1}, "dropout")]
)
def test_what_a_kernel_cannot_compute_is_refused_by_class(asked: dict[str, Any], said: str) -> None:
    row = packed()
    q, k, v = (x.detach().transpose(0, 1)[None] for x in qkv(row.total))
    with pytest.raises(ModelError, match=said) as caught:
        attend(torch.nn.Identity(), q, k, v, None, packed=row, **asked)
    assert "Identity" in str(caught.value)
