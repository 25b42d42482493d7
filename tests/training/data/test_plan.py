"""Which pairs make which step: coverage, order, identity, refusals."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.training.data.synthetic import INPUTS, Lengths
from training.config import DataConfig, PlanConfig
from training.data.order import shuffled
from training.data.plan import StepPlan, held_out, make_plan, read_plan, write_plan
from training.errors import PlanError


def some(n: int, name: str = "a", **more: Any) -> Lengths:
    rng = np.random.default_rng(n)
    return Lengths(name, [tuple(pair) for pair in rng.integers(1, 30, (n, 3)).tolist()], **more)


def planned(*datasets: Lengths, pairs_per_step: int = 4, seed: int = 0, pack_tokens: int | None = None, **data: Any):
    plan = PlanConfig(pairs_per_step=pairs_per_step, seed=seed, pack_tokens=pack_tokens)
    return make_plan(datasets, DataConfig(**data), plan)


def steps(plan: StepPlan, epoch: int = 0) -> list[list[int]]:
    first = epoch * plan.steps_per_epoch + 1
    return [plan.pairs_of(step).tolist() for step in range(first, first + plan.steps_per_epoch)]


def test_the_last_shorter_step_is_kept() -> None:
    """vector 23: 5 pairs, 2 a step: steps of 2, 2 and 1, then the epoch ends; no pair twice."""
    plan = planned(some(5), pairs_per_step=2)
    assert [len(step) for step in steps(plan)] == [2, 2, 1]
    assert sorted(sum(steps(plan), [])) == [0, 1, 2, 3, 4]
    assert [plan.epoch_of(step) for step in range(1, 8)] == [0, 0, 0, 1, 1, 1, 2]
    assert (plan.steps_per_epoch, plan.steps(2)) == (3, 6)
    assert len(plan.pairs_of(3)) == 1


def test_each_epoch_has_its_own_order() -> None:
    """case: same-order-each-epoch: 8 samples, 3 epochs, seed 7: three orders, the same three when made again."""
    orders = [[sum(steps(planned(some(8), seed=7), epoch), []) for epoch in range(3)] for _ in range(2)]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders[0]}) == 3
    assert all(sorted(order) == list(range(8)) for order in orders[0])
    assert sum(steps(planned(some(8), seed=8)), []) != orders[0][0]


def test_a_step_is_the_same_whichever_was_asked_before() -> None:
    """A resumed run asks for step 7 first; case: resume-loses-packer."""
    forward, backward = planned(some(12)), planned(some(12))
    wanted = {step: forward.pairs_of(step).tolist() for step in range(1, 10)}
    for step in (9, 1, 5, 4, 8, 2):
        assert backward.pairs_of(step).tolist() == wanted[step]


def test_order_depends_on_content_and_seed_alone() -> None:
    one, two = some(9, "one"), some(7, "two")
    assert steps(planned(one, two)) == steps(planned(two, one))
    assert planned(one, two).fingerprint == planned(two, one).fingerprint
    plan = planned(one, two)
    epochs = make_plan(
        [one, two], DataConfig(), PlanConfig(pairs_per_step=4, epochs=9, pack_tokens=400, buckets=(100,))
    )
    assert epochs.fingerprint == plan.fingerprint
    assert steps(epochs) == steps(plan)


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"pairs_per_step": 5},
        {"held_out_share": 0.3},
        {"salt": "other"},
        {"duplicates": "drop"},
        {"weights": {"a": 1.0}},
    ],
)
def test_every_setting_moves_the_fingerprint(other: dict[str, Any]) -> None:
    assert planned(some(20), **other).fingerprint != planned(some(20)).fingerprint


def test_other_datasets_move_the_fingerprint() -> None:
    assert planned(some(20, "b")).fingerprint != planned(some(20)).fingerprint
    assert planned(some(20), some(20, "b")).fingerprint != planned(some(20)).fingerprint


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.integers(1, 9),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.3]),
)
def test_every_pair_once_an_epoch(sizes: list[int], pairs_per_step: int, seed: int, share: float) -> None:
    datasets = [some(n, f"d{i}", prompts=[p // 2 + 100 * i for p in range(n)]) for i, n in enumerate(sizes)]
    try:
        plan = planned(*datasets, pairs_per_step=pairs_per_step, seed=seed, held_out_share=share)
    except PlanError as error:
        assert share
        assert "nothing to train on" in str(error)
        return
    event(f"held out: {len(plan.held_out) > 0}")
    for epoch in range(2):
        assert sorted(sum(steps(plan, epoch), [])) == plan.train.tolist()
        assert [len(step) for step in steps(plan, epoch)[:-1]] == [pairs_per_step] * (plan.steps_per_epoch - 1)
        first = epoch * plan.steps_per_epoch + 1
        assert all((plan.occurrence(first + k) == epoch).all() for k in range(plan.steps_per_epoch))
    assert sorted([*plan.train, *plan.held_out]) == list(range(sum(sizes)))


def test_held_out_pairs_share_no_prompt_with_training() -> None:
    prompts = [i // 4 for i in range(4000)]
    plan = planned(some(4000, prompts=prompts), held_out_share=0.2)
    kept, out = (set(plan.table.prompt_key[part].tolist()) for part in (plan.train, plan.held_out))
    assert not kept & out
    assert 0.16 < len(out) / 1000 < 0.24
    assert len(plan.held_out) == 4 * len(out)


def test_held_out_is_by_salted_hash() -> None:
    """Another salt holds out others; a larger share keeps what a smaller one held out; more pairs move none."""
    keys = np.arange(2000, dtype=np.uint64)
    small, large = held_out(keys, 0.1, "s"), held_out(keys, 0.3, "s")
    assert (large | ~small).all()
    assert (held_out(keys, 0.1, "t") != small).any()
    assert (held_out(keys[:500], 0.1, "s") == small[:500]).all()
    assert not held_out(keys, 0.0, "s").any()


def test_weights_are_shares_of_pairs() -> None:
    """90 pairs of a large source and 10 of a small one at equal weights: 50 places each, five passes of the small."""
    sources = ["large"] * 90 + ["small"] * 10
    plan = planned(some(100, sources=sources), pairs_per_step=8, weights={"large": 1.0, "small": 1.0})
    for epoch in range(2):
        shown = Counter(sum(steps(plan, epoch), []))
        assert sum(shown.values()) == 100
        assert sum(n for pair, n in shown.items() if pair < 90) == 50
        assert {shown[pair] for pair in range(90, 100)} == {5}
        assert all(len(set(step)) == len(step) for step in steps(plan, epoch))
    shown = Counter(pair for epoch in range(9) for step in steps(plan, epoch) for pair in step)
    assert {shown[pair] for pair in range(90)} == {5}  # 9 epochs of 50 places: each of the 90 has had its 5 turns


def test_occurrence_counts_earlier_steps() -> None:
    sources = ["large"] * 40 + ["small"] * 5
    plan = planned(some(45, sources=sources), pairs_per_step=6, weights={"large": 2.0, "small": 1.0})
    shown: Counter[int] = Counter()
    for step in range(1, plan.steps(3) + 1):
        pairs = plan.pairs_of(step).tolist()
        assert plan.occurrence(step).tolist() == [shown[pair] for pair in pairs]
        shown.update(pairs)
    assert max(shown.values()) > 3


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"large": 1.0}, "data.weights names large, but there are pairs to train on from large, small"),
        ({"large": 1.0, "small": 1.0, "none": 1.0}, "data.weights names large, none, small, but"),
        ({"large": 1.0, "small": 0.001}, "gives source small less than one pair in an epoch of 45"),
        ({"large": 1.0, "small": 3.0}, "gives source small 34 places in an epoch of 6 steps, so that its 5 pairs"),
    ],
)
def test_weights_that_cannot_be_met_are_refused(weights: dict[str, float], message: str) -> None:
    dataset = some(45, sources=["large"] * 40 + ["small"] * 5)
    with pytest.raises(PlanError, match=message):
        planned(dataset, pairs_per_step=8, weights=weights)


def test_duplicates_across_datasets() -> None:
    one, two = some(3, "one", pair_ids=["p", "q", "r"]), some(3, "two", pair_ids=["q", "s", "p"])
    kept = planned(one, two)
    assert (len(kept.table), kept.dropped) == (6, 0)
    dropped = planned(two, one, duplicates="drop")
    assert dropped.table.pair_id.to_pylist() == ["p", "q", "r", "s"]
    assert dropped.dropped == 2
    assert [dropped.table.datasets[d] for d in dropped.table.dataset] == ["ds1:one"] * 3 + ["ds1:two"]
    assert dropped.table.row.tolist() == [0, 1, 2, 1]


def test_a_dataset_given_twice() -> None:
    with pytest.raises(PlanError, match=r"dataset ds1:a is given 2 times; name it once"):
        planned(some(3), some(3))
    assert len(planned(some(3), some(3), duplicates="drop").table) == 3


def test_sources_of_several_datasets_are_joined_by_name() -> None:
    plan = planned(some(3, "one", sources=["x", "y", "x"]), some(2, "two", sources=["z", "x"]))
    assert [plan.table.sources[code] for code in plan.table.source] == ["x", "y", "x", "z", "x"]


def test_a_pair_longer_than_a_pack_is_refused_by_name() -> None:
    dataset = Lengths("a", [(10, 10, 10), (50, 30, 21), (40, 30, 21)])
    with pytest.raises(PlanError) as refused:
        planned(dataset, pack_tokens=90)
    assert str(refused.value) == (
        "pair a-1 (a, a.jsonl:2) takes 101 tokens in the shared layout, but plan.pack_tokens = 90, and 2 pairs do not "
        "fit; set it to at least 101, or prepare with a smaller max_tokens"
    )
    assert planned(dataset, pack_tokens=101).steps_per_epoch == 1


@pytest.mark.parametrize(
    ("datasets", "data", "message"),
    [
        ((), {}, "a plan needs at least one dataset"),
        ((some(0),), {}, "nothing to train on: 0 pairs in 1 datasets"),
        ((some(3, prompts=[1, 1, 1]),), {"held_out_share": 0.999999}, "3 held out; give a dataset with pairs"),
        (
            (some(3, "one"), some(3, "two", inputs={**INPUTS, "tokenizer": "tok1:01"})),
            {},
            "datasets ds1:one and ds1:two were prepared with different tokenizers, tok1:00 and tok1:01",
        ),
    ],
)
def test_refusals(datasets: tuple[Lengths, ...], data: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(*datasets, **data)


def test_a_written_plan_reads_back_the_same(tmp_path: Path) -> None:
    sources = ["large"] * 40 + ["small"] * 5
    plan = planned(
        some(45, sources=sources, pair_ids=[f"p{i % 44}" for i in range(45)]),
        weights={"large": 2.0, "small": 1.0},
        held_out_share=0.1,
        duplicates="drop",
    )
    write_plan(plan, tmp_path / "p")
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["order.arrow", "plan.json"]
    read = read_plan(tmp_path / "p")
    assert read.fingerprint == plan.fingerprint
    assert (read.dropped, read.max_tokens, read.held_out.tolist()) == (1, plan.max_tokens, plan.held_out.tolist())
    assert len(plan.held_out) > 0
    assert read.table.to_arrow().equals(plan.table.to_arrow())
    assert [steps(read, epoch) for epoch in range(2)] == [steps(plan, epoch) for epoch in range(2)]


def test_two_writers_write_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two", "one"):
        write_plan(planned(some(20)), tmp_path / name)
    for file in ("plan.json", "order.arrow"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_a_broken_plan_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    with pytest.raises(PlanError, match="plan.json is missing"):
        read_plan(folder)
    write_plan(planned(some(20)), folder)
    written = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(written.replace('"seed": 0', '"seed": 1'))
    with pytest.raises(PlanError, match="its settings make the plan"):
        read_plan(folder)
    (folder / "plan.json").write_text(written.replace('"format": 1', '"format": 2'))
    with pytest.raises(PlanError, match="format 2, but this version reads 1"):
        read_plan(folder)
    (folder / "plan.json").write_text(written[:100])
    with pytest.raises(PlanError, match="cannot be read"):
        read_plan(folder)
    (folder / "plan.json").write_text(written)
    content = bytearray((folder / "order.arrow").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "order.arrow").write_bytes(content)
    with pytest.raises(PlanError, match=r"order.arrow: found file1:.* but plan.json names file1:"):
        read_plan(folder)


def test_a_killed_writer_leaves_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any, **__: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dumps", killed)
    with pytest.raises(KeyboardInterrupt):
        write_plan(planned(some(5)), tmp_path / "p")
    assert not (tmp_path / "p" / "plan.json").exists()


def test_the_seed_of_the_order_is_the_fingerprint() -> None:
    """The rule that docs/decisions/0001 states, written again."""
    plan = planned(some(10), pairs_per_step=10)
    entropy = int(plan.fingerprint.removeprefix("plan1:"), 16)
    assert plan.pairs_of(3).tolist() == shuffled(10, entropy, 1, 2, 0, 0).tolist()
