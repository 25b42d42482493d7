"""How a step's pairs lie in packs on ranks, and what that will count: a function of plan, topology and pack_tokens.

All lengths are known beforehand, so a step is packed exactly, with no buffer that a checkpoint would have to hold:

1. Pairs are dealt to data-parallel ranks by cost, dearest first, each to the rank with the least so far (LPT, Graham
   1969: never worse than 4/3 of the best).
2. Each rank packs its own by best-fit decreasing: the longest pair first, into the fullest pack that still takes it.
3. A rank's packs are ordered dearest first, so that ranks that wait for one another meet packs of like cost; a rank
   with fewer packs than another is given empty ones.

`predict` counts whole epochs from the lengths alone: no pack is laid out. Cost: about 2 µs a pair
(benchmarks/packing.py).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.config import RunConfig, Topology
from training.data.plan import StepPlan, check_room
from training.data.table import EVERY, Choice, PairTable
from training.errors import ConfigError
from training.geometry import Layout, row_length

Integers = npt.NDArray[np.int64]

LINEAR = 12 * 1024
"""Cost of a token, where a (query, key) pair costs 2: the ratio of a transformer of width 1024, whose layers take
24 * width² FLOPs a token and 4 * width FLOPs a (query, key) pair. Wider models weigh length less, narrower ones more;
the deal is the same for all, so that a plan's packing does not change with the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """`ranks[dp rank][microbatch]` holds the table indices of one pack, in order; an empty one is padding alone.

    `lengths[dp rank][microbatch]` is that row's padded length. All ranks have the same number of microbatches.
    """

    step: int
    epoch: int
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    lengths: tuple[tuple[int, ...], ...]


def pack_tokens_for(plan: StepPlan, config: RunConfig) -> int:
    """Room of a pack: as configured, else 2 * max_tokens (which holds every pair), rounded up to the row multiple."""
    multiple = config.devices.topology.multiple
    return config.plan.pack_tokens or -(-2 * plan.max_tokens // multiple) * multiple


def pair_costs(table: PairTable, layout: Layout, pairs: Choice = EVERY) -> Integers:
    """int64[pairs]: LINEAR a token and 2 a (query, key) pair; a shared prompt is computed once."""
    prompt = table.prompt[pairs].astype(np.int64)
    squares = (prompt + table.chosen[pairs]) ** 2 + (prompt + table.rejected[pairs]) ** 2
    return LINEAR * table.tokens(layout, pairs) + squares - (prompt**2 if layout == "shared" else 0)


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Places of `costs` dealt to ranks, dearest first to the rank with the least so far; ties go to the first."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = loads[0]
        dealt[rank].append(i)
        heapq.heapreplace(loads, (load + costs[i], rank))
    return dealt


def pack(tokens: Sequence[int], members: Sequence[int], room: int) -> list[list[int]]:
    """Members (places of `tokens`) in packs of at most `room` tokens, by best-fit decreasing; ties go to the first."""
    packs: list[list[int]] = []
    open_packs: list[tuple[int, int]] = []  # (room left, pack), rising
    for i in sorted(members, key=lambda i: (-tokens[i], i)):
        fit = bisect_left(open_packs, (tokens[i], 0))
        if fit < len(open_packs):
            left, chosen = open_packs.pop(fit)
        else:
            left, chosen = room, len(packs)
            packs.append([])
        packs[chosen].append(i)
        insort(open_packs, (left - tokens[i], chosen))
    return packs


def pack_step(
    plan: StepPlan,
    step: int,
    *,
    topology: Topology,
    pack_tokens: int,
    layout: Layout,
    buckets: Sequence[int] = (),
) -> PackedStep:
    """Pack one step.

    With buckets, a row that is longer than all of them is padded to `pack_tokens`.

    Raises:
        ConfigError: pack_tokens or a bucket does not fit the topology.
        PlanError: a pair of the plan is longer than `pack_tokens`.
    """
    buckets = _checked_buckets(topology, pack_tokens, buckets)
    pairs = plan.pairs_of(step)
    check_room(plan.table, pack_tokens, layout, pairs=pairs)
    costs, tokens = pair_costs(plan.table, layout, pairs).tolist(), plan.table.tokens(layout, pairs).tolist()
    ranks = _packed(costs, tokens, topology.dp, pack_tokens)
    most = max(len(packs) for packs in ranks)
    ranks = [[*packs, *([] for _ in range(most - len(packs)))] for packs in ranks]
    return PackedStep(
        step=step,
        epoch=plan.epoch_of(step),
        ranks=tuple(tuple(tuple(int(pairs[i]) for i in pack) for pack in packs) for packs in ranks),
        lengths=tuple(
            tuple(row_length(sum(tokens[i] for i in p), multiple=topology.multiple, buckets=buckets) for p in packs)
            for packs in ranks
        ),
    )


def _packed(costs: list[int], tokens: list[int], ranks: int, room: int) -> list[list[list[int]]]:
    """[rank][pack][place]: each rank's packs dearest first, each pack's places rising."""
    dealt = deal(costs, ranks) if ranks > 1 else [list(range(len(costs)))]
    return [
        [sorted(p) for p in sorted(pack(tokens, mine, room), key=lambda p: -sum(costs[i] for i in p))] for mine in dealt
    ]


def _checked_buckets(topology: Topology, pack_tokens: int, buckets: Sequence[int]) -> tuple[int, ...]:
    for name, value in (("plan.pack_tokens", pack_tokens), *(("plan.buckets", bucket) for bucket in buckets)):
        if value % topology.multiple:
            raise ConfigError(
                f"{name}: {value} is not a multiple of {topology.multiple}, which cp = {topology.cp} and ulysses = "
                f"{topology.ulysses} need; set it to {-(-value // topology.multiple) * topology.multiple}"
            )
        if value > pack_tokens:
            raise ConfigError(f"{name}: {value} is more than plan.pack_tokens = {pack_tokens}; leave it out")
    return (*buckets, pack_tokens) if buckets else ()


def predict(
    plan: StepPlan,
    *,
    epochs: int,
    topology: Topology,
    pack_tokens: int,
    layout: Layout,
    buckets: Sequence[int] = (),
) -> pa.Table:
    """One row a step: `step`, `epoch`, every counter, and `cost_max_over_mean` of the data-parallel ranks.

    Raises:
        ConfigError, PlanError: as `pack_step`.
    """
    buckets = _checked_buckets(topology, pack_tokens, buckets)
    check_room(plan.table, pack_tokens, layout)
    costs, tokens = pair_costs(plan.table, layout), plan.table.tokens(layout)
    per_epoch = plan.steps_per_epoch
    parts: list[dict[str, npt.NDArray[Any]]] = []
    for epoch in range(epochs):
        pairs = plan.epoch(epoch).pairs
        parts.append(
            {
                "step": np.arange(per_epoch) + 1 + epoch * per_epoch,
                "epoch": np.full(per_epoch, epoch),
                **_sums(plan.table, pairs, tokens, plan.pairs_per_step),
                **_rooms(costs[pairs], tokens[pairs], plan.pairs_per_step, topology, pack_tokens, buckets),
            }
        )
    return pa.table({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def _sums(table: PairTable, pairs: Integers, tokens: Integers, pairs_per_step: int) -> dict[str, npt.NDArray[Any]]:
    """The counters that are sums over a step's pairs, whatever the packing."""
    starts = np.arange(0, len(pairs), pairs_per_step)

    def total(values: npt.NDArray[Any]) -> Integers:
        return np.add.reduceat(values.astype(np.int64), starts)

    prompt, chosen, rejected = (
        column[pairs].astype(np.int64) for column in (table.prompt, table.chosen, table.rejected)
    )
    chosen_loss, rejected_loss = total(table.chosen_loss[pairs]), total(table.rejected_loss[pairs])
    counted = np.diff(starts, append=len(pairs))
    source = total(tokens[pairs])
    return {
        "aligned_tokens": source,
        "source_tokens": source,
        "logical_tokens": total(2 * prompt + chosen + rejected),
        "loss_tokens": chosen_loss + rejected_loss,
        "chosen_loss_tokens": chosen_loss,
        "rejected_loss_tokens": rejected_loss,
        "documents": 2 * counted,
        "pairs": counted,
        "max_document_tokens": np.maximum.reduceat(prompt + np.maximum(chosen, rejected), starts),
        "sum_document_tokens_squared": total((prompt + chosen) ** 2 + (prompt + rejected) ** 2),
    }


def _rooms(
    costs: Integers, tokens: Integers, pairs_per_step: int, topology: Topology, room: int, buckets: Sequence[int]
) -> dict[str, npt.NDArray[Any]]:
    """The counters that depend on the packing, and the ranks' balance."""
    most: list[int] = []
    empty: list[int] = []
    physical: list[int] = []
    balance: list[float] = []
    for start in range(0, len(costs), pairs_per_step):
        step = slice(start, start + pairs_per_step)
        costs_here, tokens_here = costs[step].tolist(), tokens[step].tolist()
        ranks = _packed(costs_here, tokens_here, topology.dp, room)
        rows = [sum(tokens_here[i] for i in p) for packs in ranks for p in packs]
        packs = topology.dp * max(len(packs) for packs in ranks)
        most.append(packs)
        empty.append(packs - len(rows))
        physical.append(sum(row_length(used, multiple=topology.multiple, buckets=buckets) for used in rows))
        loads = [sum(costs_here[i] for p in packs for i in p) for packs in ranks]
        balance.append(max(loads) * topology.dp / sum(loads))
    packs, empty_packs = np.array(most, np.int64), np.array(empty, np.int64)
    return {
        "window_tokens": packs * room,
        "physical_tokens": np.array(physical, np.int64) + empty_packs * topology.multiple,
        "packs": packs,
        "empty_packs": empty_packs,
        "cost_max_over_mean": np.array(balance, np.float64),
    }
