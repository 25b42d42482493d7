"""Judging a model on pairs it did not see, and what it answers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.training.data import tiny
from tests.training.memory import MemoryDataset, larger_number, write_model
from training.config import DataConfig, ModelConfig, ObjectiveConfig, PlanConfig
from training.data.plan import StepPlan, make_plan
from training.errors import InputError, ModelError
from training.evaluate import answers, held_out_logps, judge_held_out, judgement
from training.parallel.device import pick
from training.reference import Floats, score_pairs
from training.scores import open_policy

CPU = pick("cpu")
DATASET = MemoryDataset(tuple(larger_number(60)))
SETTINGS = {"layout": "shared", "precision": "fp32", "device": CPU, "room": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("evaluate") / "model")


def plan_of(share: float) -> StepPlan:
    return make_plan([DATASET], DataConfig(held_out_share=share), PlanConfig())


def test_sums_count_strict_wins_and_show_ties_apart() -> None:
    """case: identical-pair"""
    chosen, rejected = np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 2.0], [3.0, 1.0]]).T
    found = judgement(chosen, rejected, np.array([0.25, 0.5, 1.0, 0.125]))
    assert (found.pairs, found.wins, found.ties, found.loss_sum) == (4, 2, 1, 1.875)
    assert (found.accuracy, found.margin) == (0.5, 0.25)


def test_held_out_pairs_are_judged_against_the_reference_by_source(model: Path) -> None:
    plan = plan_of(0.3)
    datasets = {DATASET.fingerprint: DATASET}
    assert 5 < len(plan.held_out) < 40
    logps = score_pairs(
        open_policy(ModelConfig(path=str(model)), CPU),
        lambda i: DATASET.pairs[i],
        [32] * 60,
        room=64,
        layout="shared",
        precision="fp32",
        device=CPU,
    )
    reference: Floats = logps.T[:, plan.table.row].copy()
    reference[0] -= 10  # the model is surer of the chosen side than this reference, except where it is not:
    reference[0, plan.held_out[:2]] += 20
    policy = open_policy(ModelConfig(path=str(model)), CPU)
    held = held_out_logps(policy, plan, datasets, **SETTINGS)
    judged = judge_held_out(held, plan, reference, ObjectiveConfig())
    everything = judged.pop("")
    assert everything.pairs == len(plan.held_out) and everything.wins == everything.pairs - 2
    assert set(judged) == {"even", "odd"}
    assert sum(part.wins for part in judged.values()) == everything.wins
    assert math.isclose(everything.chosen_reward_sum, 0.1 * (10 * everything.wins - 10 * 2), rel_tol=1e-4)
    assert abs(everything.rejected_reward_sum) < 1e-4
    z = np.array([1.0] * everything.wins + [-1.0] * 2)  # 0.1 * 10 either way
    assert math.isclose(everything.loss_sum, np.log1p(np.exp(-z)).sum(), rel_tol=1e-4)


def test_a_plan_that_holds_nothing_out_is_an_error(model: Path) -> None:
    policy = open_policy(ModelConfig(path=str(model)), CPU)
    with pytest.raises(InputError, match="held_out_share"):
        held_out_logps(policy, plan_of(0.0), {DATASET.fingerprint: DATASET}, **SETTINGS)


def test_answers_are_greedy_and_leave_the_prompt_out(tmp_path: Path) -> None:
    tokenizer = tiny.byte_level()
    folder = write_model(tmp_path / "model", vocab_size=tokenizer.get_vocab_size())
    tiny.write(folder, tokenizer, tiny.CHATML)
    asked = ["Which is larger?", "And now?"]
    first = answers(folder, asked, device=CPU, max_new_tokens=5)
    assert first == answers(folder, asked, device=CPU, max_new_tokens=5) and len(first) == 2
    assert all("larger" not in text and "<|im_" not in text for text in first)


def test_a_folder_without_tokenizer_cannot_answer(model: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer.json"):
        answers(model, ["?"], device=CPU)
