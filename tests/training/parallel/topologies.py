"""What every rank of a launch does: the same steps on each topology of its size, and on one process to compare with.

Run by `test_topologies.py` as `topologies.py RANKS OUT FOLDER` in RANKS processes; rank 0 writes what it found to OUT.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.training.memory import MemoryDataset, larger_number, pair, run_config, write_model
from training import weights
from training.attempt import frozen_policy
from training.config import Topology
from training.data.plan import make_plan
from training.ledger.flops import model_shape
from training.ledger.writer import LedgerWriter, read_ledger
from training.loop import Work, train
from training.parallel.device import pick
from training.parallel.fsdp import whole
from training.parallel.mesh import ALONE, World, world_of
from training.parallel.ulysses import scatter_heads
from training.reference import score_pairs
from training.scores import open_policy
from training.step import build_optimizer

CPU = pick("cpu")
DEGREES = {
    2: [(1, 2, 1, 1), (1, 1, 1, 2), (1, 1, 2, 1)],
    4: [(1, 1, 1, 4), (1, 1, 4, 1), (1, 2, 2, 1), (1, 2, 1, 2), (1, 1, 2, 2), (2, 2, 1, 1)],
    8: [(1, 2, 2, 2)],
}
"""(dp_replicate, dp_shard, cp, ulysses) by number of ranks."""
Sections = dict[str, dict[str, Any]]
ADAPTER = {"rank": 4, "alpha": 8}
VARIANTS: dict[str, tuple[str, Sections]] = {
    "live reference": ("plain", {"objective": {"reference": "live"}}),
    "adapter, its base the reference": (
        "windowed",
        {"model": {"lora": ADAPTER}, "objective": {"reference": "live", "losses": {"sigmoid": 1.0, "ipo": 0.1}}},
    ),
    "recomputed activations": ("windowed", {"model": {"checkpointing": True}}),
    "compiled parts": ("plain", {"model": {"compile": True}}),
    "mixture of experts": ("mixture", {"optimizer": {"eps": 1e-6}}),
    "bf16": ("plain", {"model": {"dtype": "bf16"}}),
}
"""A model and changed settings by name; each on every topology of two ranks.

Experts see few tokens: some of their gradients are as small as the rounding of others, and Adam's `g / (|g| + eps)`
would make a whole update of that rounding with its usual `eps` of 1e-8.
"""


def dataset() -> MemoryDataset:
    """Short pairs, and one whose prompt is most of its pack: uneven over ranks, with a row to spare for one of them."""
    long = pair(20, [7 + i % 40 for i in range(40)], [57, 3, 60], [57, 9, 9, 60])
    return MemoryDataset((*larger_number(20), long), max_tokens=48)


def write_windowed(folder: Path) -> Path:
    """Layers that see six tokens and layers that see all, one key and value head."""
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


def write_mixture(folder: Path) -> Path:
    """Four experts a layer, two of them for each token."""
    torch.manual_seed(2)
    config = Qwen3MoeConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


class Watched(torch.optim.AdamW):
    """AdamW that keeps the whole gradients of its second step; in the first one, half of an adapter has none."""

    gradients: list[torch.Tensor] | None = None
    steps = 0

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.steps += 1
        if self.steps == 2:
            self.gradients = [whole(p.grad).clone() for p in self.parameters()]
        super().step()

    def parameters(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


class Collectives(TorchDispatchMode):
    """Counts the collectives of this thread by their operator."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.count[func._opname.strip("_")] += 1
        return func(*args, **(kwargs or {}))


def documented(topology: Topology, layers: int, packs: int, steps: int) -> dict[str, int]:
    """What docs/topology.md allows a run of `steps`, with `packs` microbatches a rank in all."""
    units, cp, ulysses = layers + 1, topology.cp > 1, topology.ulysses > 1
    team, replicas = topology.sp > 1, topology.dp_replicate > 1
    made = {
        "allgather_base": packs * (units + layers + cp * layers + team),
        "reduce_scatter_base": packs * (units + cp * layers),
        "alltoall_base": packs * (ulysses * 4 * layers + team * 2),
        "allreduce": steps * (1 + replicas * units),
        "allgather": 2 * (steps + 1),  # sizes and contents of what hosts tell one another
    }
    return {name: count for name, count in made.items() if count}


def trained(model: Path, world: World, folder: Path, sections: Sections) -> dict[str, Any]:
    """Two epochs on a topology: records, gradients of the second step and weights after the last."""
    degrees = world.topology.model_dump()
    config = run_config(
        model,
        plan={"pairs_per_step": 9, "epochs": 2, "pack_tokens": 64},
        devices={"kind": "cpu", "processes": world.size, **degrees},
        **sections,
    )
    data = dataset()
    plan = make_plan([data], config.data, config.plan)
    loads: list[str] = []
    real = weights.whole_model
    weights.whole_model = lambda path, settings: loads.append(path) or real(path, settings)
    policy = open_policy(config.model, CPU, world, config.plan.seed)
    weights.whole_model = real
    live = config.objective.reference == "live"
    frozen = frozen_policy(policy, config.model, CPU, world) if live else None
    built = build_optimizer(policy.module, config.optimizer)
    scores = score_pairs(
        policy,
        lambda index: data.pairs[index],
        [len(p.prompt_ids) + len(p.chosen_ids) + len(p.rejected_ids) for p in data.pairs],
        room=64,
        layout="shared",
        precision=config.model.dtype,
        device=CPU,
        world=world,
    )
    optimizer = Watched(built.param_groups, betas=config.optimizer.betas, eps=config.optimizer.eps)
    rng = np.random.default_rng(5)
    work = Work(
        config=config,
        run_id="run",
        attempt=1,
        plan=plan,
        datasets={data.fingerprint: data},  # pyright: ignore[reportArgumentType]
        policy=policy,
        frozen=frozen,
        optimizer=optimizer,
        device=CPU,
        world=world,
        reference=rng.normal(-12, 3, (2, len(plan.table))).astype(np.float32),
        pack_tokens=64,
        shape=model_shape(policy.module.config.to_dict()),
    )
    lines = folder / f"{world.topology.model_dump_json()}-{model.name}.jsonl".replace('"', "")
    writer = LedgerWriter(lines) if world.leads else None
    with Collectives() as made:
        train(work, start=1, writer=writer, save=lambda step, judged: None, stop=lambda: False, progress=None)
    if writer:
        writer.close()
    assert optimizer.gradients is not None
    return {
        "collectives": dict(made.count),
        "whole": len(loads),
        "scores": torch.from_numpy(scores),
        "layers": policy.module.config.num_hidden_layers,
        "records": read_ledger(lines)[0] if writer else [],
        "gradients": optimizer.gradients,
        "weights": [whole(p.detach()).clone() for p in optimizer.parameters()],
    }


def distance(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Largest relative L2 distance of a tensor, and the smallest norm: a guard that nothing compared is zero."""
    pairs = list(zip(mine, theirs, strict=True))
    return max(float((a - b).norm() / b.norm()) for a, b in pairs), min(float(b.norm()) for _, b in pairs)


def compared(topology: Topology, one: Mapping[str, Any], many: Mapping[str, Any]) -> dict[str, Any]:
    """What a topology has in common with one process."""
    steps = []
    for a, b in zip(one["records"], many["records"], strict=True):
        of = {pair.row: pair for pair in b.pairs}
        steps.append(
            {
                "loss": [a.loss, b.loss],
                "pair_loss": max(abs(p.loss - of[p.row].loss) / p.loss for p in a.pairs),
                "counters": [asdict(a.counters), asdict(b.counters)],
                "flops": [a.flops, b.flops],
                "sources": [
                    [
                        [s.source, s.pairs, s.documents, s.source_tokens, s.logical_tokens, s.loss_tokens]
                        for s in r.sources
                    ]
                    for r in (a, b)
                ],
                "ranks": [b.ranks_expected, b.ranks_reported],
                "norm": [a.grad_norm, b.grad_norm],
            }
        )
    packs = sum(record.counters.packs for record in many["records"]) // topology.dp
    return {
        "collectives": many["collectives"],
        "whole": many["whole"],
        "documented": documented(topology, many["layers"], packs, len(steps)),
        "steps": steps,
        "scores": distance([many["scores"]], [one["scores"]]),
        "gradients": distance(many["gradients"], one["gradients"]),
        "weights": distance(many["weights"], one["weights"]),
    }


def heads_of(world: World) -> list[list[int]]:
    """Key heads that this rank gets of two under eight query heads, and what comes back for each of them."""
    marks = torch.arange(2.0).repeat_interleave(2).reshape(1, 2, 2).repeat(3, 1, 1).requires_grad_()
    query, key, value = scatter_heads(torch.ones(3, 8, 2), marks, marks * 10, world.ulysses)
    assert query.shape == (12, 2, 2) and torch.equal(value, key * 10)
    key.sum().backward()
    assert marks.grad is not None
    return [sorted(set(key.detach().flatten().int().tolist())), marks.grad.sum((0, 2)).int().tolist()]


def main(ranks: int, out: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        write_model(folder / "plain")
        write_windowed(folder / "windowed")
        write_mixture(folder / "mixture")
    dist.barrier()
    found: dict[str, Any] = {}
    variants = VARIANTS if ranks == 2 else {}
    for name, (model, sections) in {"plain": ("plain", {}), "windowed": ("windowed", {}), **variants}.items():
        with tempfile.TemporaryDirectory() as lines:
            one = trained(folder / model, ALONE, Path(lines), sections) if rank == 0 else {}
            for degrees in DEGREES[ranks]:
                topology = Topology(**dict(zip(Topology.model_fields, degrees, strict=True)))
                with world_of(topology, CPU) as world:
                    many = trained(folder / model, world, Path(lines), sections)
                if rank == 0:
                    found[f"{name} {degrees}"] = compared(topology, one, many)
    if ranks == 4:
        with world_of(Topology(ulysses=4), CPU) as world:
            found["heads"] = world.gather(heads_of(world))
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
