"""Log-probabilities of the supervised tokens of a pack, summed by side.

Only hidden rows that predict a supervised token meet the language-model head.

Shapes: T tokens of the row, R supervised rows, S = 2 * pairs sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from training.attention import NAME, Packed
from training.config import ModelConfig
from training.errors import ModelError
from training.geometry import Layout, Pack, PairShape, lay_out, pack_ids
from training.head import row_logps
from training.model import Policy, load_model
from training.parallel.collectives import all_to_all, join
from training.parallel.device import Device, sent
from training.parallel.mesh import ALONE, World
from training.sharding import deal_scores, shard
from training.sharding import place as place_chunks

if TYPE_CHECKING:
    from training.data.tokenize import TokenizedPair

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
        return sent(torch.from_numpy(values), device)

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


def open_policy(config: ModelConfig, device: Device, world: World = ALONE, seed: int = 0) -> Policy:
    """Load a policy and try it on two tiny pairs in one shared pack.

    Raises:
        ModelError: as `load_model`, or the log-probabilities are not those of the model's own forward pass.
    """
    policy = load_model(config, device, world, seed)
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
