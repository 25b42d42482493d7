"""Inside a step the host waits for the device once, for its numbers: on the path of a GPU, whose operators a host runs.

`varlen_attn` has no kernel for a CPU; its strict stand-in computes in its place, and what that reads is not counted.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.attention.operators import varlen_attention
from tests.training.memory import larger_number, run_config, write_model
from training import attention
from training.config import ModelConfig
from training.parallel.device import pick, sent
from training.scores import batch_of, open_policy
from training.step import Microbatch, train_step

CPU = pick("cpu")
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "unique2", "unique_dim",
         "unique_consecutive", "bincount", "repeat_interleave", "_is_all_true", "_is_any_true", "tolist"}  # fmt: skip
"""Operators whose result, or its size, a host must have before it goes on."""


class Waits(TorchDispatchMode):
    """Counts operators and what the host waits for: `WAITS`, masks as indices, and copies to the host."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        for name in ("cpu", "numpy"):
            patch.setattr(Tensor, name, self._counting(name, getattr(Tensor, name)))

    def _counting(self, name: str, method: Any) -> Any:
        def call(x: Tensor, *args: Any) -> Any:
            self.waits[name] += 1
            return method(x, *args)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname
        self.calls[name] += 1
        masks = name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        if masks or (name in WAITS and (name != "repeat_interleave" or func._overloadname == "Tensor")):
            self.waits[name] += 1
        return func(*args, **(kwargs or {}))


def test_what_waits_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard: each way to wait shows."""
    x = torch.arange(4.0)
    with Waits(monkeypatch) as found:
        x.sum().item()
        bool(x[0] > 1)
        x[x > 1]
        x.repeat_interleave(torch.tensor([1, 2, 0, 1]))
        x.cpu().numpy()
        x.repeat_interleave(2)
    assert found.waits == {"_local_scalar_dense": 2, "index": 1, "repeat_interleave": 1, "cpu": 1, "numpy": 1}


@pytest.mark.parametrize("live", [False, True])
def test_a_step_waits_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, live: bool) -> None:
    """The gradient's norm and the pairs' numbers come in one copy; nothing else is waited for.

    The optimizer is torch's SGD: AdamW counts its steps in tensors of the host, which would show here.
    """
    model = ModelConfig(path=str(write_model(tmp_path / "model")), dtype="bf16")
    policy, frozen = (open_policy(model, CPU) for _ in range(2))
    flash: Counter[int] = Counter()

    def operator(*args: Any, **told: Any) -> Tensor:
        flash[len(args[0])] += 1
        paused, count.waits = count.waits, Counter()
        out = varlen_attention(*args, **told)
        count.waits = paused
        return out

    monkeypatch.setattr(varlen, "varlen_attn", operator)
    monkeypatch.setattr(attention, "kind_of", lambda place: "gpu")
    pairs, packs = larger_number(7), []
    for members in (range(4), range(4, 7)):
        _, batch = batch_of([pairs[i] for i in members], layout="shared", device=CPU.torch)
        tokens = torch.from_numpy(np.array(batch.rows_by_side, np.float32).reshape(-1, 2).T.copy())
        packs.append(Microbatch(batch=batch, reference=None if live else torch.full_like(tokens, -12), tokens=tokens))
    config = run_config(Path(model.path), model={"dtype": "bf16"}, optimizer={"clip": 1.0})
    optimizer = torch.optim.SGD(policy.module.parameters(), lr=1e-3)
    with Waits(monkeypatch) as count:
        train_step(
            policy, optimizer, packs, frozen=frozen if live else None, pairs=7, rate=1e-3, config=config, device=CPU
        )
    layers = 2
    assert sum(flash.values()) == 2 * layers * (2 if live else 1), "every layer of each pack called the flash operator"
    assert count.calls["mm"] > 20 and count.waits == {"cpu": 1, "numpy": 1}, count.waits


class Sending:
    """Stands in for a tensor of the host: what is asked of it, in order."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def pin_memory(self) -> Sending:
        self.asked.append("pinned")
        return self

    def to(self, place: torch.device, *, non_blocking: bool) -> Sending:
        self.asked.append((str(place), non_blocking))
        return self


def test_copies_to_a_device_leave_pinned_memory_and_are_not_waited_for() -> None:
    x, held = Sending(), torch.arange(3)
    sent(x, torch.device("cuda", 1))  # pyright: ignore[reportArgumentType]
    assert x.asked == ["pinned", ("cuda:1", True)]
    assert sent(held, torch.device("cpu")) is held


def test_every_tensor_of_a_batch_is_sent_that_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch for a device is made of host arrays alone, each sent once."""
    import training.scores

    seen: list[Tensor] = []
    monkeypatch.setattr(training.scores, "sent", lambda x, place: seen.append(x) or x)
    _, batch = batch_of(larger_number(3), layout="shared", device=torch.device("cuda", 0))
    assert {id(x) for x in seen} >= {id(x) for x in (batch.row, batch.target)} and len(seen) == 4
