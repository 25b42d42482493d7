"""One optimizer step: forward and backward over its packs, then AdamW once.

With N the step's true number of pairs over all ranks and microbatches, the objective is (1 / N) * sum of the pairs'
losses. Each pack is differentiated by itself as sum / N, so that gradients add up to those of the whole step however
its pairs lie in packs. What a person reads of a step is sums and N, never a mean of means. The host waits for the
device once a step: to read the gradient's norm with everything else, before the weights are touched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from training.config import OptimizerConfig, RunConfig
from training.errors import TrainingError
from training.loss import PairLogps, judge
from training.model import Policy
from training.parallel.device import Device
from training.parallel.fsdp import clip, total_norm
from training.parallel.mesh import ALONE, World
from training.scores import Batch, side_logps

Numbers = npt.NDArray[np.float64]

COLUMNS = (
    "losses",
    "policy_chosen",
    "policy_rejected",
    "reference_chosen",
    "reference_rejected",
    "chosen_rewards",
    "rejected_rewards",
)
"""What a step tells of each pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One pack of this rank: its batch and float32[2, n] on the device, reference log-probs and supervised tokens.

    Without reference log-probs, a frozen policy gives them.
    """

    batch: Batch
    reference: Tensor | None
    tokens: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What a step did to this rank's pairs, float64[n] in the order of its packs; `joined`, to all N of them.

    `skipped` says that a gradient was not finite and the weights are untouched.
    """

    grad_norm: float
    learning_rate: float
    skipped: bool
    losses: Numbers
    policy_chosen: Numbers
    policy_rejected: Numbers
    reference_chosen: Numbers
    reference_rejected: Numbers
    chosen_rewards: Numbers
    rejected_rewards: Numbers
    compute_s: float
    optimizer_s: float

    @property
    def pairs(self) -> int:
        """N, once joined."""
        return len(self.losses)

    @property
    def loss(self) -> float:
        """The step's objective, once joined."""
        return float(self.losses.sum()) / self.pairs

    @property
    def wins(self) -> int:
        """Pairs whose chosen side has the higher reward, strictly."""
        return int((self.chosen_rewards > self.rejected_rewards).sum())

    @property
    def ties(self) -> int:
        """Pairs whose sides have the same reward."""
        return int((self.chosen_rewards == self.rejected_rewards).sum())


def joined(parts: Sequence[Outcome]) -> Outcome:
    """The outcome of a whole step from those of the data-parallel ranks, in order; times are the first one's."""
    return replace(parts[0], **{name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS})


def learning_rate(step: int, total: int, config: OptimizerConfig) -> float:
    """Rate of a step (from 1) of a run of `total` steps.

    Rises linearly over `warmup_steps`, the last of which has the full rate; then stays, or falls along a line or half a
    cosine from the full rate towards 0, which no step has.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = (step - config.warmup_steps - 1) / max(1, total - config.warmup_steps)
    if config.schedule == "linear":
        return config.lr * (1 - done)
    if config.schedule == "cosine":
        return config.lr * (1 + math.cos(math.pi * done)) / 2
    return config.lr


def parameter_groups(module: torch.nn.Module) -> dict[str, list[str]]:
    """Names of the trained parameters that decay (matrices) and of those that do not (biases and norms)."""
    groups: dict[str, list[str]] = {"decay": [], "no_decay": []}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            groups["decay" if parameter.ndim >= 2 else "no_decay"].append(name)
    return groups


def build_optimizer(module: torch.nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over `parameter_groups`; the rate is set anew at every step."""
    named = dict(module.named_parameters())
    groups = [
        {"params": [named[name] for name in names], "weight_decay": config.weight_decay if kind == "decay" else 0.0}
        for kind, names in parameter_groups(module).items()
        if names
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def train_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[Microbatch],
    *,
    frozen: Policy | None = None,
    pairs: int,
    rate: float,
    config: RunConfig,
    device: Device,
    world: World = ALONE,
) -> Outcome:
    """Do one step over this rank's packs, as many as every other rank has; `pairs` is N, over all ranks.

    Raises:
        TrainingError: no pairs, or a gradient that is not finite and `optimizer.nonfinite` is `stop`; the weights are
            untouched then.
    """
    if not pairs:
        raise TrainingError("a step without pairs has no loss; the plan must give every step at least one")
    started = time.perf_counter()
    parts: list[Tensor] = []
    for number, micro in enumerate(microbatches, 1):
        if policy.root is not None:
            policy.root.replicate_gradients(number == len(microbatches))
        parts.append(_forward_backward(policy, frozen, micro, pairs, config, device))
    gradients = [p.grad for p in policy.module.parameters() if p.grad is not None]
    norm = total_norm(gradients, world)
    host = torch.cat([norm.reshape(1).float(), *(part.flatten() for part in parts)]).cpu().double().numpy()
    columns = _by_column(host[1:], [part.shape[1] for part in parts])
    computed = time.perf_counter()
    skipped = not math.isfinite(host[0])
    if skipped and config.optimizer.nonfinite == "stop":
        optimizer.zero_grad()
        lost = int((~np.isfinite(columns[0])).sum()) if world.team_rank == 0 else 0
        raise TrainingError(
            f"the gradient's norm is {host[0]} ({sum(world.gather(lost))} of {pairs} pairs have a loss that is not "
            "finite); the weights are untouched. Lower optimizer.lr, or set optimizer.nonfinite = 'skip'"
        )
    if not skipped:
        if config.optimizer.clip is not None:
            clip(gradients, config.optimizer.clip, norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    optimizer.zero_grad()
    return Outcome(
        grad_norm=float(host[0]),
        learning_rate=rate,
        skipped=skipped,
        **dict(zip(COLUMNS, columns, strict=True)),
        compute_s=computed - started,
        optimizer_s=time.perf_counter() - computed,
    )


def pair_logps(logps: Tensor, reference: Tensor, tokens: Tensor) -> PairLogps:
    """The pairs of a pack: policy float32[2 * n] by side, reference and supervised tokens float32[2, n]."""
    return PairLogps(
        policy_chosen=logps[0::2],
        policy_rejected=logps[1::2],
        reference_chosen=reference[0],
        reference_rejected=reference[1],
        chosen_tokens=tokens[0],
        rejected_tokens=tokens[1],
    )


def _forward_backward(
    policy: Policy, frozen: Policy | None, micro: Microbatch, pairs: int, config: RunConfig, device: Device
) -> Tensor:
    """Add a pack's gradient of sum / N; gives float32[7, n], a row for each of `COLUMNS`."""
    reference = micro.reference
    with device.autocast(config.model.dtype):
        if reference is None:
            assert frozen is not None, "no reference log-probs and no frozen policy"
            with torch.no_grad():
                reference = side_logps(frozen, micro.batch).reshape(-1, 2).t()
        logps = side_logps(policy, micro.batch)
    found = pair_logps(logps, reference, micro.tokens)
    judged = judge(found, config.objective)
    (judged.loss.sum() / pairs).backward()
    columns = (
        judged.loss,
        found.policy_chosen,
        found.policy_rejected,
        found.reference_chosen,
        found.reference_rejected,
        judged.chosen_reward,
        judged.rejected_reward,
    )
    return torch.stack(columns).detach()


def _by_column(flat: Numbers, widths: Sequence[int]) -> Numbers:
    """Packs' numbers, each `[columns, n]` flattened, one after the other -> `[columns, N]`."""
    rows = len(COLUMNS)
    ends = np.cumsum([rows * n for n in widths])[:-1]
    return np.concatenate([part.reshape(rows, -1) for part in np.split(flat, ends)], axis=1)
