"""The ranks of a run: one mesh of `dp_replicate * dp_shard * cp * ulysses`, and what the trainer asks of it.

Ranks are numbered row-major over these dimensions. Ranks with the same `dp` coordinate share a pack (`cp * ulysses` of
them: a team); parameters are sharded over `dp_shard * cp * ulysses` and replicated over `dp_replicate`. A run of one
process has no process group at all, and every collective is then the identity.

Device collectives go through the device's own backend. What hosts tell one another (counters, faults, the numbers of a
step) goes through gloo in a group of its own, so that it never waits for a device.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from training.config import Topology
from training.errors import ConfigError, DeviceError
from training.parallel.device import BACKENDS, Device

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)
"""How long a collective may wait; a rank that dies is noticed at once, by its launcher and by gloo."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    """This rank's place among all, and the groups it belongs to; None stands for a group of one."""

    topology: Topology = field(default_factory=Topology)
    rank: int = 0
    ulysses: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None
    team: dist.ProcessGroup | None = None
    host: dist.ProcessGroup | None = None
    saving: dist.ProcessGroup | None = None
    """The hosts once more, for a thread that saves while the others talk."""
    parameters: DeviceMesh | None = None
    """(replicas, shards), or (shards,) where nothing is replicated: the mesh that parameters lie on."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.topology.processes

    @property
    def leads(self) -> bool:
        """Whether this rank writes the run's files and speaks for it."""
        return self.rank == 0

    @property
    def dp_rank(self) -> int:
        """Which packs this rank has a part in."""
        return self.rank // self.topology.sp

    @property
    def team_rank(self) -> int:
        """Place among the ranks that share a pack: `cp_rank * ulysses + ulysses_rank`."""
        return self.rank % self.topology.sp

    @property
    def cp_rank(self) -> int:
        """Place among the context ranks of the team."""
        return self.team_rank // self.topology.ulysses

    @property
    def ulysses_rank(self) -> int:
        """Place among the ranks that exchange sequence for heads."""
        return self.team_rank % self.topology.ulysses

    @property
    def shards(self) -> dist.ProcessGroup | None:
        """The ranks that hold different parts of each parameter."""
        return None if self.parameters is None else self.parameters.get_group(self.parameters.ndim - 1)

    def gather(self, mine: T) -> Sequence[T]:
        """What every rank gives, in order of ranks: one exchange between hosts."""
        if self.host is None:
            return [mine]
        found: list[T] = [mine] * self.size
        dist.all_gather_object(found, mine, group=self.host)
        return found

    def told(self, said: T) -> T:
        """What rank 0 says."""
        return self.gather(said)[0]


ALONE = World()


@contextmanager
def world_of(topology: Topology, device: Device) -> Generator[World]:
    """Join the ranks of a run; a process group that already stands is used and left standing.

    Raises:
        ConfigError: the number of processes is not that of the topology.
    """
    standing = dist.is_initialized()
    started = dist.get_world_size() if standing else int(os.environ.get("WORLD_SIZE", "1"))
    if started != topology.processes:
        raise ConfigError(
            f"devices.processes = {topology.processes}, but {started} process{'es were' if started > 1 else ' was'} "
            f"started; start it with `pairledger train` or `python -m training.ranks`, which start as many as "
            f"are configured, or set devices.processes and the degrees to {started}"
        )
    if topology.processes == 1:
        yield ALONE
        return
    if not standing:
        if device.kind != "cpu":
            torch.accelerator.set_device_index(device.torch.index)
        dist.init_process_group(BACKENDS[device.kind], timeout=TIMEOUT)
    try:
        prove(device)
        yield _joined(topology, device)
    finally:
        if not standing:
            dist.destroy_process_group()


def prove(device: Device) -> None:
    """Sum and gather two numbers of each rank on the device, and compare: a backend that is wrong is so in silence.

    Raises:
        DeviceError: names the collective, what came and what should have.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.tensor([1.0, float(rank)], device=device.torch)
    summed, gathered = mine.clone(), mine.new_empty(2 * size)
    dist.all_reduce(summed)
    dist.all_gather_single(gathered, mine)
    wanted = {"sum": [float(size), size * (size - 1) / 2], "gather": [x for n in range(size) for x in (1.0, float(n))]}
    for name, found in (("sum", summed), ("gather", gathered)):
        if found.tolist() != wanted[name]:
            raise DeviceError(
                f"rank {rank}: a {name} over {size} ranks on {device.name} gave {found.tolist()}, not {wanted[name]}; "
                f"its backend ({dist.get_backend()}) cannot be trusted with gradients"
            )


def _joined(topology: Topology, device: Device) -> World:
    sizes = topology.model_dump()
    mesh = init_device_mesh(device.torch.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    host = dist.new_group(backend="gloo", timeout=TIMEOUT)
    saving = dist.new_group(backend="gloo", timeout=TIMEOUT)
    assert isinstance(host, dist.ProcessGroup) and isinstance(saving, dist.ProcessGroup)
    team = mesh["cp", "ulysses"]._flatten("team")  # pyright: ignore[reportPrivateUsage]  # no public name yet
    shards = mesh["dp_shard", "cp", "ulysses"]._flatten("shards")  # pyright: ignore[reportPrivateUsage]
    return World(
        topology=topology,
        rank=dist.get_rank(),
        ulysses=mesh.get_group("ulysses") if topology.ulysses > 1 else None,
        cp=mesh.get_group("cp") if topology.cp > 1 else None,
        team=team.get_group() if topology.sp > 1 else None,
        host=host,
        saving=saving,
        parameters=shards if topology.dp_replicate == 1 else mesh["dp_replicate", "shards"],
    )
