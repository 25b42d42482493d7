"""Preference losses: pure functions of the four log-probabilities and two lengths of each pair.

Every function gives one loss a pair, never a mean: a step's loss is (1 / N) * sum, with N the step's true number of
pairs over all ranks and microbatches, which only the step knows. Notation: `chosen` and `rejected` are the policy's log
ratios to the reference, log pi(y | x) - log ref(y | x); h is their difference; s(x) = 1 / (1 + exp(-x)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu, sigmoid

from training.config import ObjectiveConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairLogps:
    """Summed log-probabilities of n pairs, float32[n] each, and their numbers of supervised tokens.

    The reference's are 0 where the objective has none.
    """

    policy_chosen: Tensor
    policy_rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def chosen(self) -> Tensor:
        """Log ratio of the chosen side."""
        return self.policy_chosen - self.reference_chosen

    @property
    def rejected(self) -> Tensor:
        """Log ratio of the rejected side."""
        return self.policy_rejected - self.reference_rejected

    @property
    def h(self) -> Tensor:
        """Difference of the log ratios."""
        return self.chosen - self.rejected

    @property
    def h_mean(self) -> Tensor:
        """Difference of the log ratios, each averaged over its tokens."""
        return self.chosen / self.chosen_tokens - self.rejected / self.rejected_tokens

    @property
    def policy_means(self) -> tuple[Tensor, Tensor]:
        """The policy's log-probabilities, averaged over tokens."""
        return self.policy_chosen / self.chosen_tokens, self.policy_rejected / self.rejected_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """What an objective says of n pairs: losses, implicit rewards beta * log ratio, all float32[n]."""

    loss: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor


def judge(x: PairLogps, objective: ObjectiveConfig) -> Judged:
    """The weighted sum of the objective's losses, plus `sft_weight` times the chosen side's loss per token."""
    loss = torch.zeros_like(x.policy_chosen)
    for name, weight in objective.losses.items():
        loss = loss + weight * LOSSES[name](x, objective)
    if objective.sft_weight:
        loss = loss + objective.sft_weight * sft(x)
    return Judged(loss=loss, chosen_reward=objective.beta * x.chosen, rejected_reward=objective.beta * x.rejected)


def sft(x: PairLogps) -> Tensor:
    """-log pi(chosen) / tokens: the mean over tokens of Iterative RPO (Pang et al. 2024, arXiv:2404.19733, eq. 1)."""
    return -x.policy_chosen / x.chosen_tokens


def dpo(x: PairLogps, o: ObjectiveConfig) -> Tensor:
    """DPO, -log s(beta h) (Rafailov et al. 2023, arXiv:2305.18290, eq. 7).

    With label smoothing e it is conservative DPO, -(1 - e) log s(beta h) - e log s(-beta h) (Mitchell 2023).
    """
    return _smoothed(o.beta * x.h, o.label_smoothing)


def dpo_norm(x: PairLogps, o: ObjectiveConfig) -> Tensor:
    """DPO on log ratios averaged over tokens (Lambert et al. 2024, arXiv:2411.15124, eq. 6), smoothed alike."""
    return _smoothed(o.beta * x.h_mean, o.label_smoothing)


def robust(x: PairLogps, o: ObjectiveConfig) -> Tensor:
    """Robust DPO, unbiased where a share e of labels is flipped (Chowdhury et al. 2024, arXiv:2403.00409, eq. 9)."""
    e, z = o.label_smoothing, o.beta * x.h
    return (-(1 - e) * logsigmoid(z) + e * logsigmoid(-z)) / (1 - 2 * e)


def ipo(x: PairLogps, o: ObjectiveConfig) -> Tensor:
    """IPO, (h - 1 / (2 beta))^2 on averaged log-probabilities (Azar et al. 2023, arXiv:2310.12036, eq. 17)."""
    return (x.h_mean - 1 / (2 * o.beta)).square()


def hinge(x: PairLogps, o: ObjectiveConfig) -> Tensor:
    """SLiC's hinge on the normalised margin, max(0, 1 - beta h) (Zhao et al. 2023, arXiv:2305.10425)."""
    return relu(1 - o.beta * x.h)


def exo_pair(x: PairLogps, o: ObjectiveConfig) -> Tensor:
    """EXO for pairs: reverse KL to the smoothed label (Ji et al. 2024, arXiv:2402.00856, eq. 16).

    Without label smoothing its logarithm is infinite; 1e-3 is taken then.
    """
    e, z = o.label_smoothing or 1e-3, o.beta * x.h
    return sigmoid(z) * (logsigmoid(z) - math.log(1 - e)) + sigmoid(-z) * (logsigmoid(-z) - math.log(e))


def apo_zero(x: PairLogps, o: ObjectiveConfig) -> Tensor:
    """APO-zero, raise the chosen and lower the rejected side (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7)."""
    return 1 - sigmoid(o.beta * x.chosen) + sigmoid(o.beta * x.rejected)


def apo_down(x: PairLogps, o: ObjectiveConfig) -> Tensor:
    """APO-down, lower both, the rejected side more (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 8)."""
    return sigmoid(o.beta * x.chosen) + 1 - sigmoid(o.beta * x.h)


def sppo_hard(x: PairLogps, o: ObjectiveConfig) -> Tensor:
    """SPPO with hard labels, win rates of 1 and 0 (Wu et al. 2024, arXiv:2405.00675, eq. 4.7)."""
    return (x.chosen - 0.5 / o.beta).square() + (x.rejected + 0.5 / o.beta).square()


def nca_pair(x: PairLogps, o: ObjectiveConfig) -> Tensor:
    """Noise contrastive alignment of two answers (Chen et al. 2024, arXiv:2402.05369, eq. 11)."""
    a, b = o.beta * x.chosen, o.beta * x.rejected
    return -logsigmoid(a) - 0.5 * logsigmoid(-a) - 0.5 * logsigmoid(-b)


def discopop(x: PairLogps, o: ObjectiveConfig, temperature: float = 0.05) -> Tensor:
    """Log-ratio modulated loss: logistic and exponential, mixed by s(z / 0.05) (Lu et al. 2024, arXiv:2406.08414)."""
    z = o.beta * x.h
    mix = sigmoid(z / temperature)
    return -logsigmoid(z) * (1 - mix) + torch.exp(-z) * mix


def simpo(x: PairLogps, o: ObjectiveConfig) -> Tensor:
    """SimPO, -log s(beta (mean chosen - mean rejected) - margin), no reference (Meng et al. 2024, arXiv:2405.14734)."""
    chosen, rejected = x.policy_means
    return -logsigmoid(o.beta * (chosen - rejected) - o.simpo_margin)


def orpo(x: PairLogps, o: ObjectiveConfig) -> Tensor:
    """ORPO, SFT - beta log s(log odds ratio), no reference (Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7).

    beta is the paper's lambda; odds are of the probability per token (geometric mean).
    """
    chosen, rejected = x.policy_means
    return sft(x) - o.beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _smoothed(z: Tensor, e: float) -> Tensor:
    return -(1 - e) * logsigmoid(z) - e * logsigmoid(-z)


def _log_odds(logp: Tensor) -> Tensor:
    below = logp.clamp(max=-torch.finfo(logp.dtype).eps)  # a certain token has no finite odds
    return below - torch.log(-torch.expm1(below))


LOSSES: dict[str, Callable[[PairLogps, ObjectiveConfig], Tensor]] = {
    "sigmoid": dpo,
    "sigmoid_norm": dpo_norm,
    "robust": robust,
    "ipo": ipo,
    "hinge": hinge,
    "exo_pair": exo_pair,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "sppo_hard": sppo_hard,
    "nca_pair": nca_pair,
    "discopop": discopop,
    "simpo": simpo,
    "orpo": orpo,
}
