"""Log-probabilities of the supervised tokens of a pack, summed by side.

Only hidden rows that predict a supervised token meet the language-model head, a chunk at a time, so that a matrix of
[tokens, vocabulary] never exists: at a vocabulary of 152k this takes 0.8 GB where full logits take 5.0, and half the
time. The backward pass computes each chunk's logits again from the saved log-sum-exps. Sums over the vocabulary are
fp32 whatever the precision of the matrix product.

Shapes: T tokens of the row, R supervised rows, H width of the model, V vocabulary, S = 2 * pairs sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from training.attention import NAME, Packed
from training.config import ModelConfig
from training.errors import ModelError
from training.geometry import Layout, Pack, PairShape, lay_out, pack_ids
from training.model import Head, Policy, load_model
from training.parallel.collectives import all_to_all, join
from training.parallel.device import Device
from training.parallel.mesh import ALONE, World
from training.sharding import deal_scores, shard
from training.sharding import place as place_chunks

if TYPE_CHECKING:
    from training.data.tokenize import TokenizedPair

CHUNK = 512
"""Supervised rows whose logits exist at one time."""
TRIAL_TOLERANCES = {"fp32": 1e-3, "bf16": 5e-2}
"""How far a side's log-probability in a pack may be from that of the model's own pass, absolute plus relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """How the ranks of a team share the scores of a pack.

    `send`, `receive`: hidden rows to and from each rank. `counts`: scores of each rank. `order`: int64[scores of the
    pack], where each stands once the ranks' scores are joined.
    """

    send: tuple[int, ...]
    receive: tuple[int, ...]
    counts: tuple[int, ...]
    order: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """This rank's part of a pack on a device: ids and positions int64[1, T], rows by side of the whole pack.

    `row`: int64, hidden rows to be scored, here or, where they are `dealt`, by the rank they are sent to. `target`:
    int64[R], the ids that the rows scored here predict.
    """

    ids: Tensor
    position: Tensor
    packed: Packed
    row: Tensor
    target: Tensor
    rows_by_side: tuple[int, ...]
    dealt: Dealt | None = None


def place(
    pack: Pack,
    pairs: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]],
    *,
    device: torch.device,
    world: World = ALONE,
) -> Batch:
    """Put a pack with the (prompt, chosen, rejected) ids of its pairs on a device; padding is id 0, never scored."""
    ids = pack_ids(pack, pairs, 0)

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    rows_by_side = tuple(int(n) for n in np.bincount(pack.score_side, minlength=2 * pack.pairs))
    if world.team is None:
        return Batch(
            ids=tensor(ids)[None],
            position=tensor(pack.position)[None],
            packed=Packed.of(pack),
            row=tensor(pack.score_row),
            target=tensor(ids[pack.score_target]),
            rows_by_side=rows_by_side,
        )
    cp, ulysses = world.topology.cp, world.topology.ulysses
    placement = place_chunks(pack, cp=cp, ulysses=ulysses)
    token = shard(pack, placement, cp_rank=world.cp_rank, ulysses_rank=world.ulysses_rank, ulysses=ulysses).token
    shares = deal_scores(pack, placement, ulysses=ulysses)
    mine = shares[world.team_rank]
    return Batch(
        ids=tensor(ids[token])[None],
        position=tensor(pack.position[token])[None],
        packed=Packed.of(pack, placement, world),
        row=tensor(mine.send),
        target=tensor(ids[pack.score_target[mine.score]]),
        rows_by_side=rows_by_side,
        dealt=Dealt(
            send=mine.send_counts,
            receive=mine.receive_counts,
            counts=tuple(len(share.score) for share in shares),
            order=tensor(np.argsort(np.concatenate([share.score for share in shares]))),
        ),
    )


def batch_of(
    pairs: Sequence[TokenizedPair],
    *,
    layout: Layout,
    device: torch.device,
    length: int | None = None,
    world: World = ALONE,
) -> tuple[Pack, Batch]:
    """Tokenized pairs in one pack, and this rank's part of it on a device."""
    pack = lay_out([_shape(p) for p in pairs], layout=layout, multiple=world.topology.multiple, length=length)
    ids = [(pair.prompt_ids, pair.chosen_ids, pair.rejected_ids) for pair in pairs]
    return pack, place(pack, ids, device=device, world=world)


def _shape(pair: TokenizedPair) -> PairShape:
    masks = [None if mask is None else np.array(mask, bool) for mask in (pair.chosen_mask, pair.rejected_mask)]
    return PairShape(
        prompt=len(pair.prompt_ids),
        chosen=len(pair.chosen_ids),
        rejected=len(pair.rejected_ids),
        chosen_mask=masks[0],
        rejected_mask=masks[1],
    )


def side_logps(policy: Policy, batch: Batch) -> Tensor:
    """Sum of the log-probabilities of each side's supervised tokens: float32[S], attached to the graph even if empty.

    A side's sum is taken over its own rows alone, in order: neighbours in the pack change nothing, nor does the number
    of ranks that share it; all of them get the same vector.
    """
    rows = policy.compute(lambda: _rows(policy, batch))
    if not batch.rows_by_side:
        return rows + rows.sum()  # no rows: an empty vector whose gradient still reaches every parameter
    return torch.stack([side.sum() for side in rows.split(batch.rows_by_side)])


def _rows(policy: Policy, batch: Batch) -> Tensor:
    """Log-probabilities of the pack's scores, in order."""
    rows = policy.hidden(batch.ids, batch.position, batch.packed)[batch.row]
    team, dealt = batch.packed.world.team, batch.dealt
    if team is None or dealt is None:
        return row_logps(rows, batch.target, policy.head)
    scored = row_logps(all_to_all(rows, team, dealt.send, dealt.receive), batch.target, policy.head)
    return join(scored, team, dealt.counts)[dealt.order]


def open_policy(config: ModelConfig, device: Device, world: World = ALONE) -> Policy:
    """Load a policy and try it on two tiny pairs in one shared pack.

    Raises:
        ModelError: as `load_model`, or the log-probabilities are not those of the model's own forward pass.
    """
    policy = load_model(config, device, world)
    prove(policy, device, config.dtype, world)
    return policy


@torch.no_grad()
def prove(policy: Policy, device: Device, dtype: Literal["fp32", "bf16"] = "fp32", world: World = ALONE) -> None:
    """Compare the sides of a tiny shared pack with the model's own (eager) forward pass over each sequence alone.

    The pack goes through the kernels of the precision it will be trained in; the model's own pass is fp32.

    Raises:
        ModelError: they differ; names the class and by how much.
    """
    module, (vocabulary, _) = policy.module, policy.head.weight.shape  # of a sharded weight: that of the whole
    ids = [number * 7919 % vocabulary for number in range(1, 16)]
    pairs = [(ids[:3], ids[3:7], ids[7:9]), (ids[9:11], ids[11:12], ids[12:15])]
    shapes = [PairShape(prompt=len(p), chosen=len(c), rejected=len(r)) for p, c, r in pairs]
    batch = place(lay_out(shapes, multiple=world.topology.multiple), pairs, device=device.torch, world=world)
    with device.autocast(dtype):
        got = side_logps(policy, batch)
    module.set_attn_implementation("eager")
    try:
        sides = [(prompt, side) for prompt, chosen, rejected in pairs for side in (chosen, rejected)]
        want = torch.stack([_alone(policy, prompt, side, device.torch) for prompt, side in sides])
    finally:
        module.set_attn_implementation(NAME)
    tolerance = TRIAL_TOLERANCES[dtype]
    if not torch.allclose(got, want, rtol=tolerance, atol=tolerance):
        raise ModelError(
            f"{type(module).__name__}: log-probabilities of packed pairs {got.tolist()} are not those of its own "
            f"forward pass {want.tolist()}; its layers or its head compute something that packs do not serve"
        )


def _alone(policy: Policy, prompt: list[int], completion: list[int], device: torch.device) -> Tensor:
    ids = torch.tensor([prompt + completion], device=device)
    logits = policy.compute(lambda: policy.module(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1])
    return logits.float().log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).sum()


def row_logps(hidden: Tensor, target: Tensor, head: Head, chunk: int = CHUNK) -> Tensor:
    """Log-probability of each row's target: `[R, H]`, `[R]` -> float32 `[R]`."""
    dtype = torch.get_autocast_dtype(hidden.device.type) if _autocast(hidden) else hidden.dtype
    return _RowLogps.apply(hidden.to(dtype), head.weight.to(dtype), head.bias, target, head.scale, head.cap, chunk)


def _autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)


class _RowLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        scale: float,
        cap: float | None,
        chunk: int,
    ) -> Tensor:
        logps = hidden.new_empty(len(target), dtype=torch.float32)
        log_sums = torch.empty_like(logps)
        for part in _chunks(len(target), chunk):
            logits, _ = _logits(hidden[part], weight, bias, scale, cap)
            hit = logits.gather(1, target[part, None])[:, 0]
            log_sums[part] = _log_sums(logits)
            logps[part] = hit - log_sums[part]
        ctx.save_for_backward(hidden, weight, bias, target, log_sums)
        ctx.scale, ctx.cap, ctx.chunk = scale, cap, chunk
        return logps

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        hidden, weight, bias, target, log_sums = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for part in _chunks(len(target), ctx.chunk):
            logits, slope = _logits(hidden[part], weight, bias, ctx.scale, ctx.cap)
            d_logits = logits.sub_(log_sums[part, None]).exp_().mul_(-gradient[part, None])  # -g * softmax
            d_logits.scatter_add_(1, target[part, None], gradient[part, None])  # + g at the target
            d_logits = d_logits * slope if isinstance(slope, Tensor) or slope != 1 else d_logits
            low = d_logits.to(hidden.dtype)
            d_hidden[part] = low @ weight
            if low.dtype == torch.float32:
                d_weight.addmm_(low.t(), hidden[part])  # in place: no second matrix of the head's size
            else:
                d_weight += low.t() @ hidden[part]
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return d_hidden, d_weight.to(weight.dtype), d_bias, None, None, None, None


def _log_sums(logits: Tensor) -> Tensor:
    """Log of the sum of exponentials of each row of `[c, V]`, which it overwrites.

    In place, because a chunk is large enough that each temporary costs its pages anew: about twice as fast on a CPU as
    `logsumexp` at a vocabulary of 152k.
    """
    peak = logits.amax(-1, keepdim=True)
    return logits.sub_(peak).exp_().sum(-1).log_().add_(peak[:, 0])


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, cap: float | None
) -> tuple[Tensor, Tensor | float]:
    """fp32 logits of a chunk `[c, V]`, and their slope with respect to the matrix product."""
    logits = (hidden @ weight.t()).float()
    if bias is not None:
        logits = logits + bias.float()
    logits = logits * scale if scale != 1 else logits
    if cap is None:
        return logits, scale
    squashed = torch.tanh(logits / cap)
    return squashed * cap, (1 - squashed.square()) * scale


def _chunks(rows: int, chunk: int) -> list[slice]:
    return [slice(start, min(rows, start + chunk)) for start in range(0, rows, chunk)]
