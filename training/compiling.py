"""The parts of a model that torch compiles: norms and feed-forward blocks.

They are chains of elementwise work, which eager mode writes to memory and reads again link by link. Attention and the
head have kernels of their own and stay as they are, so nothing here depends on spans, packs or ranks: the length of a
row is symbolic, all layers share one graph for each kind of part, and another length compiles nothing anew. On a CPU a
step takes about a tenth less time; the first one takes the time of compiling, which torch keeps on disk.
"""

from __future__ import annotations

import importlib.util
import re

import torch

from training.errors import ModelError
from training.parallel.device import Device

PARTS = re.compile(r"(Norm|MLP)$")
"""Classes of the parts that are compiled."""


def compile_parts(module: torch.nn.Module, device: Device) -> None:
    """Have every norm and feed-forward block of a model compiled at its first call.

    Raises:
        ModelError: this machine has no compiler for the device, or the model no such part.
    """
    if lacking := _lacking(device):
        raise ModelError(f"model.compile needs {lacking}; install it, or set model.compile = false")
    parts = [part for part in module.modules() if PARTS.search(type(part).__name__)]
    if not parts:
        raise ModelError(
            f"model.compile: {type(module).__name__} has no part that is compiled (classes called ...Norm or ...MLP); "
            "set model.compile = false"
        )
    for part in parts:
        part.compile(dynamic=True)


def _lacking(device: Device) -> str | None:
    if device.kind == "npu":
        return "a backend of torch.compile for the NPU, which this project does not drive"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler (torch.compile found none; CXX names one)"
    if device.kind == "gpu" and importlib.util.find_spec("triton") is None:
        return "triton, which compiles for the GPU"
    return None
