"""A packed row gives the numbers of separate sequences through plain transformers, gradients too."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from training.attention import NAME, Packed, register
from training.geometry import Pack, PairShape, Span, lay_out
from training.model import Policy
from training.scores import Batch, place, side_logps

WINDOW = 5
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "mistral": MistralConfig(**SIZES, head_dim=8, sliding_window=WINDOW),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8, **MIXED),
    "gemma2-capped-head": Gemma2Config(
        **SIZES, head_dim=8, **MIXED, attn_logit_softcapping=None, final_logit_softcapping=2.0
    ),
    "cohere-scaled-head": CohereConfig(**SIZES, logit_scale=0.25),
    "granite-scaled-head": GraniteConfig(**SIZES, logits_scaling=4.0),
}
LENGTHS = [(5, 3, 7), (1, 1, 4), (9, 1, 1), (12, 6, 2), (1, 1, 1), (3, 14, 10)]
BETA = 0.1

Ids = tuple[list[int], list[int], list[int]]


def pairs_of(lengths: Sequence[tuple[int, int, int]], seed: int = 0) -> list[Ids]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, 61, n).tolist() for n in sizes) for sizes in lengths]  # pyright: ignore


def masks_of(pairs: Sequence[Ids]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Every third completion token is not supervised, the last always is."""

    def mask(ids: list[int]) -> np.ndarray:
        return np.array([i % 3 != 1 or i == len(ids) - 1 for i in range(len(ids))])

    return [(mask(chosen), mask(rejected)) for _, chosen, rejected in pairs]


def pack_of(pairs: Sequence[Ids], layout: str, multiple: int = 8) -> Pack:
    shapes = [
        PairShape(prompt=len(p), chosen=len(c), rejected=len(r), chosen_mask=cm, rejected_mask=rm)
        for (p, c, r), (cm, rm) in zip(pairs, masks_of(pairs), strict=True)
    ]
    return lay_out(shapes, layout=layout, multiple=multiple)  # pyright: ignore[reportArgumentType]


def models(config: PreTrainedConfig, attention: str) -> tuple[Policy, torch.nn.Module]:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention).float()
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=register()).float()
    ours.load_state_dict(plain.state_dict())
    assert ours.config._attn_implementation == NAME
    return Policy(module=ours.train()), plain.train()


def alone(plain: torch.nn.Module, pairs: Sequence[Ids]) -> Tensor:
    logps = []
    for (prompt, chosen, rejected), masks in zip(pairs, masks_of(pairs), strict=True):
        for side, mask in zip((chosen, rejected), masks, strict=True):
            ids = torch.tensor([prompt + side])
            scores = plain(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            logps.append(scores.gather(1, torch.tensor(side)[:, None])[torch.from_numpy(mask)].sum())
    return torch.stack(logps)


def gradients(module: torch.nn.Module, logps: Tensor, reference: Tensor) -> dict[str, Tensor]:
    h = (logps - reference)[0::2] - (logps - reference)[1::2]
    module.zero_grad()
    (-logsigmoid(BETA * h).sum() / len(h)).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def reference_of(pairs: Sequence[Ids]) -> Tensor:
    sides = torch.tensor([len(side) for _, chosen, rejected in pairs for side in (chosen, rejected)])
    return -4.0 * sides + torch.randn(len(sides), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, how) for name in CONFIGS for how in ("sdpa", "eager") if how == "eager" or not name.endswith("-head")],
)
def test_log_probabilities_and_gradients_equal_separate_sequences(name: str, attention: str) -> None:
    """case: packed-no-varlen, packed-label-leak; vectors 17, 19"""
    policy, plain = models(CONFIGS[name], attention)
    pairs = pairs_of(LENGTHS)
    reference = reference_of(pairs)
    want = alone(plain, pairs)
    want_gradients = gradients(plain, want, reference)
    whole = math.sqrt(sum(float(g.square().sum()) for g in want_gradients.values()))
    for layout in ("shared", "concat"):
        pack = pack_of(pairs, layout)
        assert pack.total > pack.used  # there is padding that must not matter
        got = side_logps(policy, place(pack, pairs, device=torch.device("cpu")))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
        got_gradients = gradients(policy.module, got, reference)
        assert got_gradients.keys() == want_gradients.keys() and len(got_gradients) > 10
        compared = 0
        for key, gradient in want_gradients.items():
            norm = float(gradient.norm())
            if norm > 1e-6 * whole:  # below it is zero but for rounding, like the bias of keys
                assert float((got_gradients[key] - gradient).norm()) <= 1e-5 * norm, (layout, key)
                compared += 1
        assert compared > 10


def wrong(pack: Pack, how: str) -> tuple[Span, ...]:
    if how == "rejected also sees chosen":
        return tuple(s if len(s.keys) == 1 else Span(s.q0, s.q1, ((s.keys[0][0], s.q1),)) for s in pack.spans)
    return (Span(0, pack.total, ((0, pack.total),)),)  # one sequence


@pytest.mark.parametrize("how", ["rejected also sees chosen", "one sequence"])
def test_a_wrong_geometry_would_be_seen(how: str) -> None:
    policy, plain = models(CONFIGS["qwen3"], "sdpa")
    pairs = pairs_of(LENGTHS)
    pack = pack_of(pairs, "shared")
    batch = place(pack, pairs, device=torch.device("cpu"))
    spans = Packed(wrong(pack, how), pack.total)
    broken = Batch(
        ids=batch.ids,
        position=batch.position,
        packed=spans,
        row=batch.row,
        target=batch.target,
        rows_by_side=batch.rows_by_side,
    )
    with torch.no_grad():
        assert float((side_logps(policy, broken) - alone(plain, pairs)).abs().max()) > 1e-2


def test_neighbours_order_padding_and_buckets_change_nothing() -> None:
    """case: ref-batch-dependence, packed-label-leak"""
    policy, _ = models(CONFIGS["qwen3"], "sdpa")
    pairs = pairs_of([(2, 1, 2), (20, 15, 15)])
    cpu = torch.device("cpu")
    with torch.no_grad():
        both = side_logps(policy, place(pack_of(pairs, "shared"), pairs, device=cpu))
        swapped = side_logps(policy, place(pack_of(pairs[::-1], "shared"), pairs[::-1], device=cpu))
        first = side_logps(policy, place(pack_of(pairs[:1], "shared"), pairs[:1], device=cpu))
        padded = side_logps(policy, place(pack_of(pairs[:1], "shared", 32), pairs[:1], device=cpu))
    torch.testing.assert_close(swapped, both[[2, 3, 0, 1]], rtol=1e-5, atol=0)
    torch.testing.assert_close(first, both[:2], rtol=1e-5, atol=0)
    torch.testing.assert_close(padded, both[:2], rtol=1e-5, atol=0)


def test_nothing_of_one_pair_reaches_another_and_padding_reaches_none() -> None:
    """case: packed-no-varlen, tnd-tail-not-covered"""
    policy, _ = models(CONFIGS["gemma3"], "sdpa")
    pairs = pairs_of([(3, 2, 2), (2, 2, 3)])
    changed = [([7, *pairs[0][0][1:]], *pairs[0][1:]), pairs[1]]
    pack = pack_of(pairs, "shared")
    cpu = torch.device("cpu")
    assert pairs[0] != changed[0] and pack.total > pack.used
    with torch.no_grad():
        a, b = (side_logps(policy, place(pack, ids, device=cpu)) for ids in (pairs, changed))
        batch = place(pack, pairs, device=cpu)
        batch.ids[0, pack.used :] = 9
        c = side_logps(policy, batch)
    assert not torch.equal(a[:2], b[:2])
    assert torch.equal(a[2:], b[2:]) and torch.equal(a, c)


def test_an_empty_pack_scores_nothing_and_keeps_its_graph() -> None:
    """vector 16"""
    policy, _ = models(CONFIGS["qwen3"], "sdpa")
    logps = side_logps(policy, place(lay_out([], multiple=4), [], device=torch.device("cpu")))
    assert logps.shape == (0,)
    logps.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.module.parameters())
