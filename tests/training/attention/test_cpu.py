"""Spans in pieces: every pair of query and key once, and the same numbers as a call a span."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.attention import Packed, cpu, spans
from training.geometry import PairShape, Span, lay_out


@settings(deadline=None)
@given(
    block=st.integers(1, 9), n=st.integers(1, 70), before=st.lists(st.integers(1, 9), max_size=3), own=st.integers(0, 9)
)
def test_pieces_hold_every_query_and_key_of_a_span_once(block: int, n: int, before: list[int], own: int) -> None:
    starts = [sum(before[:i]) + 2 * i for i in range(len(before))]  # gaps between the ranges of keys
    ranges = [(a, a + length) for a, length in zip(starts, before, strict=True)]
    cut = 200 + own + n // 2  # inside the queries' own keys, as a chunk's end may be
    span = Span(100, 100 + n, (*ranges, *((a, b) for a, b in ((200, cut), (cut, 200 + own + n)) if a < b)))
    keys = [i for a, b in span.keys for i in range(a, b)]
    want = Counter((100 + q, key) for q in range(n) for key in keys[: len(keys) - n + q + 1])
    found: Counter[tuple[int, int]] = Counter()
    for piece in cpu.pieces(span, block):
        assert not piece.causal or piece.n == piece.m <= block
        for i in range(piece.count):
            q0, k0 = piece.q0 + i * piece.step, piece.k0 + i * piece.step
            found.update((q0 + q, k0 + k) for q in range(piece.n) for k in range(q + 1 if piece.causal else piece.m))
    assert found == want


def test_few_calls_serve_a_long_span() -> None:
    assert len(list(cpu.pieces(Span(0, 32 * 1024, ((0, 32 * 1024),))))) == 10
    assert len(list(cpu.pieces(Span(0, 32 * 1024 - 1, ((0, 32 * 1024 - 1),))))) == 19


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("layout", ["shared", "concat"])
@pytest.mark.parametrize("strided", [False, True])
def test_pieces_give_what_a_call_a_span_gives(dtype: torch.dtype, tolerance: float, layout: str, strided: bool) -> None:
    shapes = [PairShape(prompt=p, chosen=c, rejected=r) for p, c, r in ((100, 90, 200), (5, 1, 70), (64, 64, 129))]
    row = Packed.of(lay_out(shapes, layout="shared" if layout == "shared" else "concat", multiple=16))
    assert max(len(list(cpu.pieces(span))) for span in row.spans) > 3
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(row.total, h, 16, generator=generator, dtype=torch.float64).to(dtype) for h in (4, 2, 2, 4)]
    if strided:
        made = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in made]
        assert not made[0].is_contiguous()
    results = []
    for function, exact in ((cpu.attention, dtype), (spans.attention, torch.float64)):
        q, k, v = (x.detach().to(exact, copy=True).requires_grad_() for x in made[:3])
        out = function(q, k, v, row, 0.3, None)
        assert out.dtype == exact
        out.backward(made[3].to(exact))
        results.append([out.detach(), q.grad, k.grad, v.grad])
    for got, want in zip(*results, strict=True):
        assert got is not None and want is not None and want.abs().max() > 0.5
        torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def test_a_pair_s_neighbours_change_no_bit_of_it() -> None:
    shape = PairShape(prompt=90, chosen=80, rejected=33)
    alone = Packed.of(lay_out([shape]))
    among = Packed.of(lay_out([PairShape(prompt=7, chosen=70, rejected=5), shape, shape]))
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(among.total, h, 8, generator=generator) for h in (4, 2, 2))
    own = slice(82, 82 + alone.total)
    got = cpu.attention(q, k, v, among, 0.3, None)[own]
    assert torch.equal(got, cpu.attention(q[own], k[own], v[own], alone, 0.3, None))


def test_values_of_another_width_go_span_by_span() -> None:
    row = Packed.of(lay_out([PairShape(prompt=9, chosen=4, rejected=5)]))
    q, k, v = (torch.randn(row.total, 2, width) for width in (8, 8, 6))
    got = cpu.attention(q, k, v, row, 0.3, None)
    torch.testing.assert_close(got, spans.attention(q, k, v, row, 0.3, None))
    wide = cpu.attention(q, k, torch.nn.functional.pad(v, (0, 2)), row, 0.3, None)
    torch.testing.assert_close(got, wide[..., :6])


@pytest.mark.parametrize("window", [1, 40, 255, 300, 2000])
def test_a_window_over_many_blocks_of_queries(window: int) -> None:
    span = Span(100, 700, ((0, 50), (100, 700)))
    row = Packed([Span(0, 100, ((0, 100),)), span], 700)
    q, k, v = (torch.randn(700, h, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    got = spans.attention(q, k, v, row, 0.3, window)[100:]
    keys, values = (torch.cat([x[:50], x[100:]]).repeat_interleave(2, 1) for x in (k, v))
    before = torch.arange(50, 650)[:, None] - torch.arange(650)
    hide = (before < 0) | (before >= window)
    scores = (torch.einsum("qhd,khd->hqk", q[100:], keys) * 0.3).masked_fill(hide, float("-inf"))
    want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    torch.testing.assert_close(got, want)
    leaves = (q, k, v)
    upstream = torch.randn_like(want)
    for mine, theirs in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
