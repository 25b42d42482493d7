"""Which devices are found, and what is said of one that is not there."""

from __future__ import annotations

import pytest
import torch

from training.errors import DeviceError
from training.parallel import device
from training.parallel.device import Device, kind_of, pick


def test_the_cpu_is_always_there() -> None:
    assert pick("cpu").torch == torch.device("cpu")
    assert kind_of(torch.device("cuda", 1)) == "gpu"
    with pytest.raises(DeviceError, match="meta"):
        kind_of(torch.device("meta"))


def test_a_device_that_is_not_there_is_refused_with_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Device(kind="cpu", torch=torch.device("cpu"), name="cpu")
    monkeypatch.setattr(device, "available", lambda: [cpu])
    assert pick("auto") == cpu
    with pytest.raises(DeviceError, match="'npu'.*this machine has cpu.*CANN") as caught:
        pick("npu")
    assert caught.value.exit_code == 5


def test_auto_takes_the_best_device(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [Device(kind=k, torch=torch.device(t), name=t) for k, t in (("gpu", "cuda"), ("cpu", "cpu"))]  # pyright: ignore
    monkeypatch.setattr(device, "available", lambda: both)
    assert pick("auto").kind == "gpu" and pick("cpu").kind == "cpu"


def test_bf16_is_a_context_and_fp32_is_none() -> None:
    cpu = pick("cpu")
    weight = torch.ones(2, 2)
    with cpu.autocast("bf16"):
        assert (weight @ weight).dtype == torch.bfloat16
    with cpu.autocast("fp32"):
        assert (weight @ weight).dtype == torch.float32
