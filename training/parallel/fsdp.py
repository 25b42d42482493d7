"""FSDP2: parameters, gradients and optimizer state in shards over `dp_shard * cp * ulysses`, replicated over the rest.

Gradients are plain sums over all ranks: each rank differentiates its own part of (1 / N) * sum of the pairs' losses, so
that nothing is left to average. Divide factor 1 alone would ask a backend for a scaled sum, which gloo has not; forcing
sums makes it plain. Packs of a step are reduced one by one, into shards, so that no rank ever holds a whole gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from training.parallel.mesh import World

T = TypeVar("T")


class Gathered(nn.Module):
    """A module around another, whose `forward` runs what it is given while the inner one's parameters are whole.

    Parameters that are read beside their own module's forward (the head's matrix, tied to the embeddings) are then as
    good as any.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[[], T]) -> T:
        """What `compute` gives."""
        return compute()

    def run(self, compute: Callable[[], T]) -> T:
        """As `forward`; without gradients nothing comes after that would shard the parameters again, so this does."""
        found: T = self(compute)
        if not torch.is_grad_enabled():
            assert isinstance(self, FSDPModule)
            self.reshard()
        return found

    def replicate_gradients(self, now: bool) -> None:
        """Whether the next backward pass also sums gradients over replicas: only the last one of a step has to."""
        assert isinstance(self, FSDPModule)
        self.set_requires_all_reduce(now)


def shard(module: nn.Module, mesh: DeviceMesh) -> Gathered:
    """Shard a module's parameters in place: each repeated layer by itself, the rest as one."""
    for layer in layers(module):
        _sharded(layer, mesh)
    root = Gathered(module)
    _sharded(root, mesh)
    return root


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers that transformers says must not be split over devices."""
    names: set[str] = set(getattr(module, "_no_split_modules", None) or ())
    return (child for child in module.modules() if type(child).__name__ in names)


def _sharded(module: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(module, mesh=mesh)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def local(x: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: Tensor) -> Tensor:
    """All of a tensor that may be sharded; a collective."""
    return x.full_tensor() if isinstance(x, DTensor) else x


@torch.no_grad()
def total_norm(gradients: Sequence[Tensor], world: World) -> Tensor:
    """Euclidean norm of all gradients: a scalar, the same on every rank. One collective where they are sharded."""
    norm = get_total_norm([local(gradient) for gradient in gradients])
    if world.shards is None:
        return norm
    squares = norm.float().square()
    dist.all_reduce(squares, group=world.shards)
    return squares.sqrt()


@torch.no_grad()
def clip(gradients: Sequence[Tensor], largest: float, norm: Tensor) -> None:
    """Scale gradients in place so that their norm, which is given, is at most `largest`."""
    scale = (largest / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local(gradient).mul_(scale)
