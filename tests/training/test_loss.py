"""Losses against published numbers and against a second implementation in numpy float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from training.config import LOSS_NAMES, REFERENCE_FREE, ObjectiveConfig, parse
from training.errors import ConfigError
from training.loss import LOSSES, PairLogps, judge

Numbers = np.ndarray


def pair(pc: float, pr: float, rc: float, rr: float, nc: float = 1, nr: float = 1) -> PairLogps:
    values = [torch.tensor([x], dtype=torch.float64) for x in (pc, pr, rc, rr, nc, nr)]
    return PairLogps(**dict(zip(PairLogps.__dataclass_fields__, values, strict=True)))


def loss(name: str, x: PairLogps, **settings: object) -> float:
    return LOSSES[name](x, ObjectiveConfig.model_validate({"losses": {name: 1.0}, "beta": 0.1, **settings})).item()


def test_numbers_of_one_pair() -> None:
    """vector 13"""
    x = pair(-10, -12, -11, -11.5)
    assert x.h.item() == 1.5
    assert loss("sigmoid", x) == pytest.approx(0.620957, abs=1e-6)
    assert loss("sigmoid", x, label_smoothing=0.1) == pytest.approx(0.635957, abs=1e-6)
    assert loss("ipo", x) == pytest.approx(12.25)
    free = pair(-10, -12, 0, 0)
    assert loss("sigmoid", free, reference="none") == pytest.approx(0.598139, abs=1e-6)
    judged = judge(x, ObjectiveConfig())
    assert judged.chosen_reward.item() == pytest.approx(0.1)
    assert judged.rejected_reward.item() == pytest.approx(-0.05)
    assert loss("sigmoid", pair(-3, -4, -3, -4)) == pytest.approx(math.log(2), abs=1e-15)


def test_reference_values_are_used() -> None:
    """case: ref-values-ignored"""
    x = pair(-12, -15, -13, -14)
    judged = judge(x, ObjectiveConfig())
    assert judged.loss.item() == pytest.approx(0.598139, abs=1e-6)
    assert loss("sigmoid", pair(-12, -15, 0, 0)) == pytest.approx(0.554355, abs=1e-6)  # what ignoring them would give
    assert (judged.chosen_reward.item(), judged.rejected_reward.item()) == pytest.approx((0.1, -0.1))


def sig(x: Numbers) -> Numbers:
    return 1 / (1 + np.exp(-x))


def ce(x: Numbers, e: float) -> Numbers:
    return -(1 - e) * np.log(sig(x)) - e * np.log(1 - sig(x))


def odds(p: Numbers) -> Numbers:
    return p / (1 - p)


B, E, M = 0.3, 0.2, 0.7
SECOND: dict[str, Callable[..., Numbers]] = {
    "sigmoid": lambda a, b, **_: ce(B * (a - b), E),
    "sigmoid_norm": lambda a, b, nc, nr, **_: ce(B * (a / nc - b / nr), E),
    "robust": lambda a, b, **_: ((1 - E) * ce(B * (a - b), 0) - E * ce(B * (b - a), 0)) / (1 - 2 * E),
    "ipo": lambda a, b, nc, nr, **_: (a / nc - b / nr - 1 / (2 * B)) ** 2,
    "hinge": lambda a, b, **_: np.maximum(0, 1 - B * (a - b)),
    "exo_pair": lambda a, b, **_: (
        sig(B * (a - b)) * np.log(sig(B * (a - b)) / (1 - E)) + sig(B * (b - a)) * np.log(sig(B * (b - a)) / E)
    ),
    "apo_zero": lambda a, b, **_: sig(-B * a) + sig(B * b),
    "apo_down": lambda a, b, **_: sig(B * a) + sig(B * (b - a)),
    "sppo_hard": lambda a, b, **_: (a - 1 / (2 * B)) ** 2 + (b + 1 / (2 * B)) ** 2,
    "nca_pair": lambda a, b, **_: -np.log(sig(B * a)) - (np.log(sig(-B * a)) + np.log(sig(-B * b))) / 2,
    "discopop": lambda a, b, **_: (
        np.log1p(np.exp(-B * (a - b))) * sig(-B * (a - b) / 0.05) + np.exp(-B * (a - b)) * sig(B * (a - b) / 0.05)
    ),
    "simpo": lambda pc, pr, nc, nr, **_: ce(B * (pc / nc - pr / nr) - M, 0),
    "orpo": lambda pc, pr, nc, nr, **_: (
        -pc / nc + B * np.log1p(odds(np.exp(pr / nr)) / odds(np.exp(pc / nc)))  # -log s(log x) = log(1 + 1 / x)
    ),
}


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_every_loss_equals_a_second_implementation(name: str) -> None:
    assert set(LOSSES) == set(LOSS_NAMES) == set(SECOND)
    rng = np.random.default_rng(0)
    nc, nr = rng.integers(1, 9, (2, 50)).astype(np.float64)
    pc, pr = -rng.gamma(2, 1, (2, 50)) * nc, -rng.gamma(2, 1, (2, 50)) * nr
    (pc, rc), (pr, rr) = pc, pr
    values = [torch.from_numpy(x) for x in (pc, pr, rc, rr, nc, nr)]
    x = PairLogps(**dict(zip(PairLogps.__dataclass_fields__, values, strict=True)))
    smoothing = E if name in ("sigmoid", "sigmoid_norm", "robust", "exo_pair") else 0.0
    objective = ObjectiveConfig(losses={name: 1.0}, beta=B, label_smoothing=smoothing, simpo_margin=M)
    got = LOSSES[name](x, objective).numpy()
    if name in REFERENCE_FREE:
        want = SECOND[name](pc=pc, pr=pr, nc=nc, nr=nr)
    else:
        want = SECOND[name](a=pc - rc, b=pr - rr, nc=nc, nr=nr)
    assert np.ptp(want) > 0.1  # the pairs tell losses apart
    np.testing.assert_allclose(got, want, rtol=1e-9)


def test_losses_are_added_by_weight_with_the_sft_term() -> None:
    x = pair(-10, -12, -11, -11.5, nc=4, nr=3)
    objective = ObjectiveConfig(losses={"sigmoid": 0.5, "hinge": 2.0}, sft_weight=0.25)
    want = 0.5 * loss("sigmoid", x) + 2 * loss("hinge", x) + 0.25 * 10 / 4
    assert judge(x, objective).loss.item() == pytest.approx(want)


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_gradients_are_finite_far_from_the_reference(name: str) -> None:
    for pc, pr in ((-0.0, -2000.0), (-2000.0, -0.0)):
        leaves = [torch.tensor([v], requires_grad=True) for v in (pc, pr)]
        rest = [torch.tensor([v]) for v in (-900.0, -900.0, 100.0, 100.0)]
        x = PairLogps(**dict(zip(PairLogps.__dataclass_fields__, [*leaves, *rest], strict=True)))
        LOSSES[name](x, ObjectiveConfig(losses={name: 1.0})).sum().backward()
        if name != "discopop":  # exp(-z) is infinite there, as its paper has it
            assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ({"losses": {"dpo": 1.0}}, "'dpo'"),
        ({"losses": {}}, "nothing"),
        ({"losses": {"ipo": 1.0}, "label_smoothing": 0.1}, "label_smoothing = 0.1"),
    ],
)
def test_an_objective_that_says_nothing_is_refused(objective: dict[str, object], said: str) -> None:
    from training.config import RunConfig

    with pytest.raises(ConfigError, match="objective") as caught:
        parse({"objective": objective}, RunConfig, where="run.toml")
    assert said in str(caught.value)


def test_only_losses_that_compare_need_a_reference() -> None:
    """vector 21"""
    assert ObjectiveConfig().reads_reference
    assert not ObjectiveConfig(losses={"simpo": 1.0, "orpo": 0.5}).reads_reference
    assert not ObjectiveConfig(reference="none").reads_reference
    assert ObjectiveConfig(losses={"simpo": 1.0, "sigmoid": 0.5}).reads_reference
