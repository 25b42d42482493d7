"""One step: its weights do not depend on how pairs lie in packs or on ranks, and what it reports are sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.memory import larger_number, run_config, write_model
from training.config import ModelConfig, OptimizerConfig, RunConfig
from training.data.tokenize import TokenizedPair
from training.errors import TrainingError
from training.model import Policy
from training.parallel.device import pick
from training.scores import batch_of, open_policy
from training.step import Microbatch, Outcome, build_optimizer, learning_rate, parameter_groups, train_step

CPU = pick("cpu")
PAIRS = larger_number(7)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("step") / "model")


@pytest.fixture
def policy(model: Path) -> Policy:
    return open_policy(ModelConfig(path=str(model)), CPU)


def micro(pairs: Sequence[TokenizedPair], reference: np.ndarray) -> Microbatch:
    _, batch = batch_of(pairs, layout="shared", device=CPU.torch)
    tokens = np.array(batch.rows_by_side, np.float32).reshape(-1, 2).T.copy()
    return Microbatch(batch=batch, reference=torch.from_numpy(reference), tokens=torch.from_numpy(tokens))


def reference_of(places: Sequence[int]) -> np.ndarray:
    """Made up, and different for every pair."""
    return np.array([[-12.0 - i for i in places], [-16.0 + i for i in places]], np.float32)


def split(parts: Sequence[Sequence[int]]) -> list[Microbatch]:
    return [micro([PAIRS[i] for i in part], reference_of(part)) for part in parts]


def run(policy: Policy, parts: Sequence[Sequence[int]], pairs: int, config: RunConfig) -> tuple[Outcome, torch.Tensor]:
    """The outcome of a step and the gradient it was taken with; the weights stay."""
    kept: list[torch.Tensor] = []

    class Watcher(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            kept.append(torch.cat([p.grad.flatten() for p in policy.module.parameters() if p.grad is not None]))

    optimizer = Watcher(policy.module.parameters(), lr=0.0)
    outcome = train_step(policy, optimizer, split(parts), pairs=pairs, rate=0.0, config=config, device=CPU)
    return outcome, kept[0]


def free(folder: Path, **sections: dict[str, object]) -> RunConfig:
    return run_config(folder, optimizer={"clip": None}, **sections)


def test_a_step_does_not_depend_on_its_microbatches(policy: Policy, model: Path) -> None:
    """case: accum-mean-of-means, metrics-summed; vectors 14, 15"""
    config = free(model)
    whole, gradient = run(policy, [range(4)], 4, config)
    assert gradient.norm() > 1e-3 and np.ptp(whole.losses) > 1e-2
    for parts in ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0], [1, 2, 3]], [[0, 1], [], [2, 3]]):
        outcome, other = run(policy, parts, 4, config)
        assert outcome.loss == pytest.approx(whole.loss, rel=1e-6)
        assert float((other - gradient).norm()) < 1e-6 * float(gradient.norm())
        assert (outcome.pairs, outcome.wins, outcome.ties) == (4, whole.wins, whole.ties)
        np.testing.assert_allclose(outcome.losses, whole.losses, rtol=1e-5)
    assert whole.loss == pytest.approx(whole.losses.mean())


def test_ranks_with_unequal_pairs_add_up_to_one_process(policy: Policy, model: Path) -> None:
    """case: rank-imbalance, metrics-rank0; vector 14"""
    config = free(model)
    whole, gradient = run(policy, [range(7)], 7, config)
    ranks = [run(policy, parts, 7, config) for parts in ([[0], [1, 2]], [[3], [4, 5, 6]])]
    assert float((ranks[0][1] + ranks[1][1] - gradient).norm()) < 1e-6 * float(gradient.norm())
    assert sum(outcome.losses.sum() for outcome, _ in ranks) / 7 == pytest.approx(whole.loss, rel=1e-6)
    mean_of_means = np.mean([outcome.losses.mean() for outcome, _ in ranks])
    assert abs(mean_of_means - whole.loss) > 1e-4  # the wrong weighting would be seen


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 0.0), ("bf16", 1e-2)])
def test_a_policy_equal_to_its_reference_starts_at_ln_2_and_all_ties(
    policy: Policy, model: Path, dtype: str, bound: float
) -> None:
    """case: step0-not-ln2, identical-pair"""
    config = free(model, model={"dtype": dtype})
    first, _ = run(policy, [range(7)], 7, config)
    reference = np.stack([first.policy_chosen, first.policy_rejected]).astype(np.float32)
    watched = torch.optim.SGD(policy.module.parameters(), lr=0.0)
    outcome = train_step(policy, watched, [micro(PAIRS, reference)], pairs=7, rate=0.0, config=config, device=CPU)
    assert outcome.loss == pytest.approx(math.log(2), abs=max(bound, 1e-7))
    assert (outcome.wins, outcome.ties) == (0, 7)
    assert not outcome.chosen_rewards.any() and not outcome.rejected_rewards.any()


def test_rates_rise_then_fall_and_depend_on_nothing_but_the_step() -> None:
    """case: lr-start-lost"""
    config = OptimizerConfig(lr=1e-3, warmup_steps=4, schedule="linear")
    rates = [learning_rate(step, 10, config) for step in range(1, 11)]
    want = [0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 5e-3 / 6, 4e-3 / 6, 3e-3 / 6, 2e-3 / 6, 1e-3 / 6]
    assert rates == pytest.approx(want)
    assert rates[5:] == [learning_rate(step, 10, config) for step in range(6, 11)]
    cosine = [learning_rate(s, 8, config.model_copy(update={"schedule": "cosine"})) for s in (5, 7)]
    assert cosine == pytest.approx([1e-3, 0.5e-3])
    assert learning_rate(9, 10, config.model_copy(update={"schedule": "constant"})) == 1e-3


def spoil(policy: Policy) -> None:
    with torch.no_grad():
        next(policy.module.parameters())[PAIRS[0].chosen_ids[0]] = float("inf")


def test_a_gradient_that_is_not_finite_stops_the_run_with_the_weights_untouched(policy: Policy, model: Path) -> None:
    """case: nan-step"""
    optimizer = build_optimizer(policy.module, run_config(model).optimizer)
    spoil(policy)
    before = [p.detach().clone() for p in policy.module.parameters()]
    with pytest.raises(TrainingError, match="untouched"):
        train_step(policy, optimizer, split([[0, 1]]), pairs=2, rate=1e-3, config=run_config(model), device=CPU)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.module.parameters(), strict=True))
    assert all(p.grad is None for p in policy.module.parameters())
    config = run_config(model, optimizer={"nonfinite": "skip"})
    outcome = train_step(policy, optimizer, split([[0, 1]]), pairs=2, rate=1e-3, config=config, device=CPU)
    assert outcome.skipped and not math.isfinite(outcome.grad_norm) and not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, policy.module.parameters(), strict=True))


def test_a_step_without_pairs_is_an_error(policy: Policy, model: Path) -> None:
    """vector 16"""
    with pytest.raises(TrainingError, match="without pairs"):
        run(policy, [[]], 0, run_config(model))


def test_a_gradient_is_clipped_as_a_whole(policy: Policy, model: Path) -> None:
    _, gradient = run(policy, [range(4)], 4, free(model))
    outcome, clipped = run(policy, [range(4)], 4, run_config(model, optimizer={"clip": 1e-2}))
    assert outcome.grad_norm == pytest.approx(float(gradient.norm()), rel=1e-5)
    assert float(gradient.norm()) > 0.1 and float(clipped.norm()) == pytest.approx(1e-2, rel=1e-3)


def test_matrices_decay_and_norms_do_not(policy: Policy, model: Path) -> None:
    groups = parameter_groups(policy.module)
    assert "model.layers.0.self_attn.q_proj.weight" in groups["decay"]
    assert "model.norm.weight" in groups["no_decay"]
    assert sum(map(len, groups.values())) == len(list(policy.module.parameters()))
    optimizer = build_optimizer(policy.module, OptimizerConfig(weight_decay=0.1))
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
