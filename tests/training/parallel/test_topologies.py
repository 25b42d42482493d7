"""What a run computes and counts does not depend on how it is spread over ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.training.parallel.launch import launch
from tests.training.parallel.topologies import DEGREES, VARIANTS

pytestmark = pytest.mark.distributed

FEWER_HEADS = [[[0], [12, 12]], [[0], [12, 12]], [[1], [12, 12]], [[1], [12, 12]]]
"""case: kv-heads-fewer: two key heads over four ranks are 0, 0, 1, 1, and the gradients of both copies come back: of a
rank's 3 tokens, 2 wide, from 2 ranks."""

SAME = (
    "source_tokens",
    "logical_tokens",
    "loss_tokens",
    "chosen_loss_tokens",
    "rejected_loss_tokens",
    "documents",
    "pairs",
    "aligned_tokens",
    "max_document_tokens",
    "sum_document_tokens_squared",
)


@pytest.fixture(scope="module", params=[2, 4, 8])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("topologies")
    done = launch("topologies.py", request.param, str(request.param), str(folder / "found.json"), str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    assert found.pop("heads", FEWER_HEADS) == FEWER_HEADS
    models = 2 + (len(VARIANTS) if request.param == 2 else 0)
    assert len(found) == models * len(DEGREES[request.param])
    return found


def test_losses_scores_gradients_and_weights_are_those_of_one_process(found: dict[str, Any]) -> None:
    """Two epochs; relative L2 distance of each tensor at most 2e-6 in fp32, and of the scores of all pairs beforehand.

    Full weights, an adapter, live references, recomputed activations, experts. bf16 keeps 8 bits of a product, so that
    sums taken in another order differ by about 2 ** -8 = 4e-3 of each; the second step's gradients are taken at weights
    that differ already.

    case: sp-loss-scale, gloo-average, rank-imbalance, sp-border-label, sp-remainder; vectors 14, 16, 17, 19
    """
    for topology, run in found.items():
        tolerance = 8e-3 if topology.startswith("bf16") else 2e-6
        for kind in ("scores", "gradients", "weights"):
            distance, smallest = run[kind]
            twice = 2.5 if (topology[:4], kind) == ("bf16", "gradients") else 1
            assert distance <= twice * tolerance and smallest > 1e-4, (topology, kind, distance, smallest)
        assert len(run["steps"]) == 6
        for step in run["steps"]:
            one, many = step["loss"]
            assert many == pytest.approx(one, rel=tolerance / 2) and one > 0.01, topology
            assert step["pair_loss"] <= tolerance, topology
            assert step["norm"][1] == pytest.approx(step["norm"][0], rel=5 * tolerance), topology


def test_counts_are_those_of_one_process_to_the_token(found: dict[str, Any]) -> None:
    """case: metrics-rank0, sp-same-data; vector 25: an uneven last step of 21 pairs waits for nobody."""
    for topology, run in found.items():
        assert [step["counters"][1]["pairs"] for step in run["steps"]] == [9, 9, 3, 9, 9, 3], topology
        for step in run["steps"]:
            one, many = step["counters"]
            assert {name: one[name] for name in SAME} == {name: many[name] for name in SAME}, topology
            assert step["sources"][0] == step["sources"][1] and len(step["sources"][0]) == 2, topology
            assert step["flops"][0] == step["flops"][1], topology
            assert step["flops"][0] or topology.startswith("mixture"), "the work of experts is not known"
            assert many["physical_tokens"] >= one["source_tokens"] > 0
            expected, reported = step["ranks"]
            assert expected == reported > 1, topology


def test_a_rank_without_pairs_has_an_empty_pack(found: dict[str, Any]) -> None:
    """case: uneven-steps: three pairs on four data-parallel ranks."""
    four = [run for topology, run in found.items() if "(2, 2, 1, 1)" in topology]
    for run in four:
        assert [step["counters"][1]["empty_packs"] for step in run["steps"]] == [0, 0, 1, 0, 0, 1]


def test_no_rank_loads_a_whole_model_unless_its_files_hold_other_tensors(found: dict[str, Any]) -> None:
    for topology, run in found.items():
        assert run["whole"] == (1 if topology.startswith("mixture") else 0), topology


def test_a_step_makes_the_collectives_that_are_documented_and_no_other(found: dict[str, Any]) -> None:
    for topology, run in found.items():
        if topology.startswith(("live", "adapter", "recomputed")):
            continue  # further forward passes make more of the same
        assert run["collectives"] == run["documented"], topology
