"""The one place that knows which devices there are.

A kind is `cpu`, `gpu` (CUDA or ROCm, which torch both calls `cuda`) or `npu` (Ascend, through `torch_npu`, imported
only when asked for or when nothing else is there: importing it on a machine without CANN fails). Asking for a kind that
is not there is a `DeviceError` that names what was found, raised before any weight is read.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch

from training.errors import DeviceError

Kind = Literal["cpu", "gpu", "npu"]
TORCH_TYPES: dict[Kind, str] = {"cpu": "cpu", "gpu": "cuda", "npu": "npu"}
BACKENDS: dict[Kind, str] = {"cpu": "gloo", "gpu": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
"""Who carries collectives: tensors on a device by its own backend, those of hosts by gloo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device as torch names it, with the name a person knows it by and the version of its vendor's library."""

    kind: Kind
    torch: torch.device
    name: str

    def autocast(self, dtype: Literal["fp32", "bf16"]) -> AbstractContextManager[object]:
        """The context of a forward pass in this precision; weights stay what they are."""
        if dtype == "fp32":
            return nullcontext()
        return torch.autocast(self.torch.type, dtype=torch.bfloat16)


def pick(kind: Literal["auto", "cpu", "gpu", "npu"] = "auto", index: int = 0) -> Device:
    """The device of this kind, or the best one there is; `index` is this process's among those of its machine.

    Raises:
        DeviceError: names the kind asked for and the kinds found, or how many devices there are.
    """
    found = available()
    for device in found:
        if kind in ("auto", device.kind):
            return _numbered(device, index)
    raise DeviceError(
        f"devices.kind = {kind!r}, but this machine has {', '.join(f'{d.kind} ({d.name})' for d in found)}; "
        f"set devices.kind to one of them, or to 'auto'"
        + (": torch_npu and CANN must be installed for npu" if kind == "npu" else "")
    )


def _numbered(device: Device, index: int) -> Device:
    if device.kind == "cpu" or not index:
        return device
    if index >= (count := torch.accelerator.device_count()):
        raise DeviceError(
            f"process {index + 1} of this machine needs a device of its own, but {count} of kind {device.kind} are "
            "there; lower devices.processes and its degrees, or spread the run over more machines"
        )
    return replace(device, torch=torch.device(device.torch.type, index))


def available() -> list[Device]:
    """What is there, best first; the CPU always is."""
    found: list[Device] = []
    if torch.cuda.is_available():
        version = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
        name = f"{torch.cuda.get_device_name(0)}, {version}"
        found.append(Device(kind="gpu", torch=torch.device("cuda", 0), name=name))
    elif importlib.util.find_spec("torch_npu"):
        found += _npus()
    found.append(Device(kind="cpu", torch=torch.device("cpu"), name="cpu"))
    return found


def _npus() -> list[Device]:
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError):  # installed without CANN, or for another torch
        return []
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != "npu":
        return []
    npu = torch.npu  # pyright: ignore[reportAttributeAccessIssue]  # torch_npu puts it there
    npu.config.allow_internal_format = False  # plain row-major layouts, so that views mean what they say
    npu.set_compile_mode(jit_compile=False)  # no compilation for each new shape
    name = f"{npu.get_device_name(0)}, CANN {npu.utils.get_cann_version() or 'of unknown version'}"
    return [Device(kind="npu", torch=torch.device("npu", 0), name=name)]


def sent(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on a device. The copy leaves page-locked memory, so that the host does not wait for it."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def kind_of(device: torch.device) -> Kind:
    """The kind of a tensor's device."""
    for kind, name in TORCH_TYPES.items():
        if device.type == name:
            return kind
    raise DeviceError(f"device {device} is none of {', '.join(TORCH_TYPES)}")
