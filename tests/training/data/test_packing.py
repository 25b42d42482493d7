"""Packs and predictions against the geometry, pack by pack, and against packings worked out by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.training.data.synthetic import Lengths
from training.config import DataConfig, PlanConfig, RunConfig, Topology
from training.data.packing import LINEAR, PackedStep, deal, pack, pack_step, pack_tokens_for, pair_costs, predict
from training.data.plan import StepPlan, make_plan
from training.errors import ConfigError, PlanError
from training.geometry import Counters, Layout, PairShape, count, lay_out


def plan_of(lengths: Sequence[tuple[int, int, int]], pairs_per_step: int, **data: Any) -> StepPlan:
    config = PlanConfig(pairs_per_step=pairs_per_step, pack_tokens=10**6)
    return make_plan([Lengths("a", lengths)], DataConfig(**data), config)


def test_deal_by_hand() -> None:
    """7 goes to rank 0, 5 to 1, 4 to 1 (5 < 7), 3 to 0, 1 to 1 (9 < 10): 10 each."""
    assert deal([3, 7, 1, 5, 4], 2) == [[1, 0], [3, 4, 2]]


def test_deal_breaks_ties_by_place() -> None:
    assert deal([2, 2, 2, 2, 2], 3) == [[0, 3], [1, 4], [2]]


def test_pack_by_hand() -> None:
    """Room 10: 7; 6; 4 joins the 6 (fuller is better: 10); 3 joins the 7 (10); 2, 2 open a third."""
    tokens = [2, 7, 3, 6, 2, 4]
    assert pack(tokens, range(6), 10) == [[1, 2], [3, 5], [0, 4]]


def test_best_fit_is_the_fullest_that_takes_it() -> None:
    """6 and 5 are open with 4 and 5 left; a 4 goes where 4 is left, and then a 5 still fits."""
    assert pack([6, 5, 4], [0, 1, 2], 10) == [[0, 2], [1]]


@given(st.lists(st.integers(1, 10), min_size=1, max_size=7))
def test_packing_is_near_the_best(tokens: list[int]) -> None:
    """At most one pack more than the best, which is found by trying every packing."""
    packs = pack(tokens, range(len(tokens)), 10)
    assert sorted(itertools.chain(*packs)) == list(range(len(tokens)))
    assert all(sum(tokens[i] for i in p) <= 10 for p in packs)
    assert len(packs) <= _fewest(tuple(sorted(tokens, reverse=True)), ()) + 1


def _fewest(tokens: tuple[int, ...], bins: tuple[int, ...]) -> int:
    if not tokens:
        return len(bins)
    head, rest = tokens[0], tokens[1:]
    places = [i for i, used in enumerate(bins) if used + head <= 10]
    options = [_fewest(rest, (*bins[:i], bins[i] + head, *bins[i + 1 :])) for i in places]
    return min([*options, _fewest(rest, (*bins, head))])


@pytest.mark.parametrize("layout", ["shared", "concat"])
def test_costs_count_the_spans(layout: Layout) -> None:
    """LINEAR a token and 2 a (query, key) pair, but for the diagonal, which squares count half."""
    plan = plan_of([(3, 2, 4), (1, 1, 1), (20, 5, 9)], 3)
    for i, cost in enumerate(pair_costs(plan.table, layout).tolist()):
        prompt, chosen, rejected = (int(c[i]) for c in (plan.table.prompt, plan.table.chosen, plan.table.rejected))
        laid = lay_out([PairShape(prompt=prompt, chosen=chosen, rejected=rejected)], layout=layout)
        seen = sum(span.cost() for span in laid.spans)
        assert cost == LINEAR * laid.used + 2 * seen - laid.used


def counted(plan: StepPlan, packed: PackedStep, topology: Topology, pack_tokens: int, layout: Layout) -> Counters:
    """The step's counters by laying every pack out: what the ledger will record."""
    total = Counters()
    for packs, lengths in zip(packed.ranks, packed.lengths, strict=True):
        for members, length in zip(packs, lengths, strict=True):
            shapes = [
                PairShape(
                    prompt=int(plan.table.prompt[i]),
                    chosen=int(plan.table.chosen[i]),
                    rejected=int(plan.table.rejected[i]),
                )
                for i in members
            ]
            laid = lay_out(shapes, layout=layout, multiple=topology.multiple, length=length)
            total += count(laid, pack_tokens=pack_tokens)
    return total


lengths_strategy = st.lists(st.tuples(*[st.integers(1, 20)] * 3), min_size=1, max_size=30)
topologies = st.builds(
    Topology,
    dp_replicate=st.integers(1, 2),
    dp_shard=st.integers(1, 3),
    cp=st.integers(1, 2),
    ulysses=st.sampled_from([1, 2]),
)


@settings(deadline=None)
@given(lengths_strategy, topologies, st.integers(1, 12), st.sampled_from(["shared", "concat"]), st.booleans())
def test_a_prediction_is_what_the_packs_count(
    lengths: list[tuple[int, int, int]], topology: Topology, pairs_per_step: int, layout: Layout, bucketed: bool
) -> None:
    plan = plan_of(lengths, pairs_per_step)
    pack_tokens = 96
    buckets = (32, 64) if bucketed else ()
    options: dict[str, Any] = {
        "topology": topology, "pack_tokens": pack_tokens, "layout": layout, "buckets": buckets
    }  # fmt: skip
    predicted = predict(plan, epochs=2, **options).to_pylist()
    assert [row["step"] for row in predicted] == list(range(1, plan.steps(2) + 1))
    empty = 0
    for row in predicted:
        packed = pack_step(plan, row["step"], **options)
        assert row["epoch"] == packed.epoch == (row["step"] - 1) // plan.steps_per_epoch
        assert len(packed.ranks) == topology.dp
        assert len({len(packs) for packs in packed.ranks}) == 1
        assert len(packed.ranks[0]) >= 1
        members = [i for packs in packed.ranks for p in packs for i in p]
        assert sorted(members) == sorted(plan.pairs_of(row["step"]).tolist())
        if bucketed:
            used = {
                n for ps, ns in zip(packed.ranks, packed.lengths, strict=True) for p, n in zip(ps, ns, strict=True) if p
            }
            assert used <= {32, 64, 96}
        found = counted(plan, packed, topology, pack_tokens, layout)
        assert found.violations() == []
        assert asdict(found) == {field.name: row[field.name] for field in fields(Counters)}
        assert row["cost_max_over_mean"] >= 1 - 1e-12
        empty += found.empty_packs
    event(f"empty packs: {empty > 0}")


def test_counters_on_another_topology() -> None:
    """source, logical, loss, documents and pairs are the same on any topology; window, physical and packs are not."""
    rng = np.random.default_rng(0)
    plan = plan_of([tuple(pair) for pair in rng.integers(1, 60, (64, 3)).tolist()], 32)
    one, many = (
        predict(plan, epochs=1, topology=t, pack_tokens=256, layout="shared")
        for t in (Topology(), Topology(dp_shard=4, cp=2, ulysses=2))
    )
    same = "source_tokens logical_tokens loss_tokens chosen_loss_tokens rejected_loss_tokens documents pairs".split()
    assert all(one[name].equals(many[name]) for name in same)
    assert not one["physical_tokens"].equals(many["physical_tokens"])


def test_every_rank_has_the_same_number_of_microbatches() -> None:
    """case: uneven-steps: 5 packs on 2 ranks: 3 microbatches each, the sixth is padding and counted."""
    plan = plan_of([(1, 1, 6)] * 5, 5)
    packed = pack_step(plan, 1, topology=Topology(dp_shard=2, ulysses=2), pack_tokens=8, layout="shared")
    assert [[len(p) for p in packs] for packs in packed.ranks] == [[1, 1, 1], [1, 1, 0]]
    assert packed.lengths == ((8, 8, 8), (8, 8, 2))
    row = predict(plan, epochs=1, topology=Topology(dp_shard=2, ulysses=2), pack_tokens=8, layout="shared").to_pylist()[
        0
    ]
    assert (row["packs"], row["empty_packs"], row["physical_tokens"], row["window_tokens"]) == (6, 1, 42, 48)


def test_three_pairs_left_for_two_ranks() -> None:
    """vector 25: one step of 2 + 1 pairs, N = 3; nothing repeats."""
    plan = plan_of([(2, 2, 2)] * 3, 4)
    assert plan.steps_per_epoch == 1
    packed = pack_step(plan, 1, topology=Topology(dp_shard=2), pack_tokens=12, layout="shared")
    assert sorted(sum(len(p) for p in packs) for packs in packed.ranks) == [1, 2]
    assert sorted(i for packs in packed.ranks for p in packs for i in p) == [0, 1, 2]


def test_five_samples_on_two_ranks() -> None:
    """case: sampler-pads: each of 5 pairs exactly once; fewer pairs than ranks give a rank of padding alone."""
    plan = plan_of([(2, 2, 2)] * 5, 2)
    packed = [pack_step(plan, s, topology=Topology(dp_shard=2), pack_tokens=12, layout="shared") for s in (1, 2, 3)]
    assert sorted(i for p in packed for packs in p.ranks for members in packs for i in members) == [0, 1, 2, 3, 4]
    assert sorted(len(packs[0]) for packs in packed[2].ranks) == [0, 1]


def test_ranks_of_one_group_pack_the_same() -> None:
    """case: sp-same-data: dp 2 with sp 2: a pack belongs to the data rank; groups are disjoint and cover all 8 once."""
    plan = plan_of([(n, 2, 3) for n in range(1, 9)], 8)
    topologies = [Topology(dp_shard=2, ulysses=2), Topology(dp_replicate=2, ulysses=2)]
    packed = [pack_step(plan, 1, topology=t, pack_tokens=32, layout="shared") for t in topologies for _ in range(2)]
    assert all(one.ranks == packed[0].ranks for one in packed)
    groups = [{i for members in packs for i in members} for packs in packed[0].ranks]
    assert not groups[0] & groups[1]
    assert groups[0] | groups[1] == set(range(8))


def test_packs_after_a_resume() -> None:
    """case: resume-loses-packer: 12 samples, packs of 16; wherever it stops, the rest is the unbroken run's."""
    lengths = [(1, 1, n) for n in (3, 5, 2, 8, 1, 4, 6, 2, 7, 3, 5, 1)]

    def run(first: int) -> list[tuple[tuple[tuple[int, ...], ...], ...]]:
        plan = plan_of(lengths, 4)
        return [
            pack_step(plan, step, topology=Topology(), pack_tokens=16, layout="shared").ranks
            for step in range(first, 7)
        ]

    whole = run(1)
    assert all(run(stop + 1) == whole[stop:] for stop in range(1, 6))
    for epoch in (whole[:3], whole[3:]):
        assert sorted(i for step in epoch for packs in step for p in packs for i in p) == list(range(12))


def test_dearest_packs_come_first() -> None:
    rng = np.random.default_rng(1)
    plan = plan_of([tuple(pair) for pair in rng.integers(1, 90, (60, 3)).tolist()], 60)
    packed = pack_step(plan, 1, topology=Topology(dp_shard=2), pack_tokens=300, layout="shared")
    costs = pair_costs(plan.table, "shared")
    for packs in packed.ranks:
        sums = [int(costs[list(p)].sum()) for p in packs]
        assert sums == sorted(sums, reverse=True)
        assert len(sums) > 5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pack_tokens": 30}, ConfigError, r"plan.pack_tokens: 30 is not a multiple of 4, .* set it to 32"),
        ({"pack_tokens": 64, "buckets": (6,)}, ConfigError, r"plan.buckets: 6 is not a multiple of 4"),
        (
            {"pack_tokens": 64, "buckets": (8, 128)},
            ConfigError,
            r"plan.buckets: 128 is more than plan.pack_tokens = 64",
        ),
        ({"pack_tokens": 16}, PlanError, r"pair a-0 \(a, shard 0, row 0\) takes 19 tokens .* set it to at least 19"),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception], message: str) -> None:
    plan = plan_of([(9, 5, 5)], 2)
    for call in (
        lambda: pack_step(plan, 1, topology=Topology(ulysses=4), layout="shared", **options),
        lambda: predict(plan, epochs=1, topology=Topology(ulysses=4), layout="shared", **options),
    ):
        with pytest.raises(error, match=message):
            call()


def test_pack_tokens_default_to_two_sides() -> None:
    limited = make_plan([Lengths("a", [(9, 5, 5)], max_tokens=501)], DataConfig(), PlanConfig())
    assert pack_tokens_for(limited, RunConfig()) == 1002
    assert pack_tokens_for(limited, RunConfig.model_validate({"plan": {"pack_tokens": 64}})) == 64
    unlimited = make_plan([Lengths("a", [(9, 5, 5), (3, 8, 12)])], DataConfig(), PlanConfig())
    assert pack_tokens_for(unlimited, RunConfig()) == 30  # twice the longest side, 3 + 12


def realistic(n: int) -> list[tuple[int, int, int]]:
    """Lengths as of chat preferences: prompts of about 100 tokens, answers of about 250, long tails."""
    rng = np.random.default_rng(5)
    columns = [
        np.clip(rng.lognormal(np.log(m), s, n), 1, 900).astype(int) for m, s in ((100, 1), (250, 0.7), (220, 0.7))
    ]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_fill_and_balance_on_lengths_like_real_ones() -> None:
    lengths = realistic(4096)
    fills = {}
    for pairs_per_step in (64, 512):
        plan = plan_of(lengths, pairs_per_step)
        table = predict(plan, epochs=1, topology=Topology(), pack_tokens=4096, layout="shared")
        fills[pairs_per_step] = np.mean(table["source_tokens"].to_numpy() / table["window_tokens"].to_numpy())
    assert fills[64] > 0.94
    assert fills[512] > 0.985
    balanced = predict(
        plan_of(lengths, 512), epochs=1, topology=Topology(dp_shard=8), pack_tokens=4096, layout="shared"
    )
    assert np.mean(balanced["cost_max_over_mean"].to_numpy()) < 1.05
