"""Compiled parts give what the eager ones give, whatever the length, from one graph a kind of part."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from tests.training.memory import larger_number, write_model
from training.compiling import compile_parts
from training.config import ModelConfig
from training.errors import ModelError
from training.model import load_model
from training.parallel.device import pick
from training.scores import batch_of, side_logps

CPU = pick("cpu")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated:DeprecationWarning")  # torch's own, inside its compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which it means to hide
def test_rows_of_any_length_share_the_graphs_of_the_first_and_gradients_are_the_eager_ones(tmp_path: Path) -> None:
    """A fused norm adds its row in another order; over layers that comes to as much as another topology does, 2e-6."""
    folder = str(write_model(tmp_path / "model", num_hidden_layers=3))
    eager, compiled = (load_model(ModelConfig(path=folder, compile=asked), CPU) for asked in (False, True))
    counters.clear()
    graphs: list[int] = []
    for count in (3, 5, 9, 20):
        _, batch = batch_of(larger_number(count), layout="shared", device=CPU.torch)
        results = []
        for policy in (eager, compiled):
            policy.module.zero_grad()
            logps = side_logps(policy, batch)
            (logps * torch.linspace(0.5, 1.5, len(logps))).sum().backward()
            results.append([logps.detach(), *(p.grad for p in policy.module.parameters())])
        for got, want in zip(*results, strict=True):
            assert got is not None and want is not None
            assert float((got - want).norm() / want.norm()) <= 2e-6 and float(want.norm()) > 1e-4
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] <= 4  # norms of the stream and of heads, feed-forward; not one a layer
    assert len(set(graphs)) == 1


def test_a_machine_without_a_compiler_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    folder = write_model(tmp_path / "model")
    with pytest.raises(ModelError, match=r"model.compile needs a C\+\+ compiler.*set model.compile = false"):
        load_model(ModelConfig(path=str(folder), compile=True), CPU)
    load_model(ModelConfig(path=str(folder)), CPU)


def test_an_npu_and_a_model_without_such_parts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="NPU"):
        compile_parts(torch.nn.Linear(1, 1), SimpleNamespace(kind="npu"))
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "c++")
    with pytest.raises(ModelError, match="Linear has no part that is compiled"):
        compile_parts(torch.nn.Linear(1, 1), CPU)
