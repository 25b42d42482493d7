"""Behind the device `npu`: the operators of torch, run on the host over the bytes that stand for the device's memory.

torch_npu registers its operators with torch's dispatcher. Those that allocate or view stay torch_npu's own; each of the
others is registered again, as the host's operator of the same name on tensors over the same bytes. What is torch_npu's
alone (`npu_fusion_attention` and its gradient, casts) is written here. An operator that is neither is torch_npu's, ends
in a stub of the runtime and fails.

Stricter than a host: float64 is refused, since a device has no float64 to compute with, and every operator, copy and
float64 is counted in `CALLS`, so that a test can say how often a step waits for the device.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.training.attention.operators import fusion_attention

CALLS: Counter[str] = Counter()
"""Operators by name; `to host` and `to device` for every copy that a program waits for, and number that it reads."""

MEMORY = {
    "empty",
    "empty_strided",
    "set_",
    "resize_",
    "record_stream",
    "is_pinned",
    "_pin_memory",
    "is_set_to",
    "_resize_output_",
    "_reshape_alias",
}
"""Operators on memory that change none of it, beside views: torch_npu's own."""

_library = torch.library.Library("aten", "IMPL")
_own = torch.library.Library("npu", "IMPL")
_clean = ThreadPoolExecutor(1)
"""A thread outside autograd, for kernels that are defined by what autograd makes of their forward pass."""


def host(x: Tensor) -> Tensor:
    """The bytes of a tensor on the device, as a tensor of the host."""
    if x.dtype in (torch.float64, torch.complex128):
        raise TypeError(f"{x.dtype} on an npu: it has no float64 to compute with")
    storage = x.untyped_storage()
    bytes_ = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    empty = torch.empty(0, dtype=x.dtype)
    return (
        empty.set_(bytes_, x.storage_offset(), x.size(), x.stride()) if storage.nbytes() else empty.new_empty(x.size())
    )


def lift(x: Tensor, device: torch.device) -> Tensor:
    """A new tensor on the device with a host tensor's values and strides."""
    out = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
    host(out).copy_(x)
    return out


def on_device(x: object) -> bool:
    """Whether this is a tensor of the emulated device."""
    return isinstance(x, Tensor) and x.device.type == "npu"


def kernel(operator: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The host's operator, as one of the device."""

    def run(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        leaves = pytree.tree_leaves((args, kwargs))
        device = next((x.device for x in leaves if on_device(x)), torch.device("npu", torch.npu.current_device()))
        stands_for: dict[int, tuple[Tensor, Tensor]] = {}

        def down(x: Any) -> Any:
            if isinstance(x, torch.device):
                return torch.device("cpu")
            if not on_device(x):
                return x
            below = host(x)
            stands_for[id(below)] = (below, x)
            return below

        def up(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return stands_for[id(x)][1] if id(x) in stands_for else lift(x, device)

        found = operator(*pytree.tree_map(down, args), **pytree.tree_map(down, kwargs))
        for below, above in stands_for.values():
            assert below.shape == above.shape, f"{name} changed the shape of what it was given"
        return pytree.tree_map(up, found)

    return functools.wraps(run)(run)


def overloads() -> Iterator[tuple[str, Any]]:
    """Each operator of torch that torch_npu serves and that neither allocates nor views."""
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        base, _, overload = name.partition(".")
        if space != "aten" or base in MEMORY or not torch._C._dispatch_has_kernel_for_dispatch_key(full, "PrivateUse1"):
            continue
        operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if operator is None or any(r.alias_info and not r.alias_info.is_write for r in operator._schema.returns):
            continue
        if any(
            torch._C._dispatch_has_kernel_for_dispatch_key(full, key)
            for key in ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
        ):
            yield full, operator


def define(library: torch.library.Library, name: str, function: Callable[..., Any]) -> None:
    """Register a kernel of the device over torch_npu's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(name, function, "PrivateUse1", allow_override=True)


# -- copies: the only operators that see both sides --


def _count(source: Tensor, place: str, non_blocking: bool, to: Tensor | None) -> None:
    """Count a copy between host and device, unless it is asynchronous and its host side page-locked."""
    CALLS["copy"] += 1
    if (source.device.type == "npu") != (place == "npu"):
        below = source if place == "npu" else to
        behind = non_blocking and below is not None and below.is_pinned()
        CALLS["to device" if place == "npu" else "to host"] += not behind


def copy_(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """As `aten::copy_`."""
    _count(source, "npu" if on_device(to) else "cpu", non_blocking, to)
    (host(to) if on_device(to) else to).copy_(host(source) if on_device(source) else source)
    return to


def to_copy(
    x: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """As `aten::_to_copy`."""
    place = x.device if device is None else torch.device(device)
    _count(x, place.type, non_blocking, None)
    below = torch.ops.aten._to_copy(
        host(x) if on_device(x) else x, dtype=dtype, layout=layout, memory_format=memory_format
    )
    return lift(below, place) if place.type == "npu" else below


def foreach_copy_(to: list[Tensor], source: list[Tensor], non_blocking: bool = False) -> None:
    """As `aten::_foreach_copy_`."""
    for a, b in zip(to, source, strict=True):
        copy_(a, b)


def item(x: Tensor) -> Any:
    """As `aten::_local_scalar_dense`: the program waits for a number."""
    CALLS["to host"] += 1
    return host(x).item()


# -- torch_npu's own --


def cast(x: Tensor, dtype: torch.dtype, *rest: Any) -> Tensor:
    """As `npu_dtype_cast`."""
    CALLS["npu_dtype_cast"] += 1
    return x if x.dtype == dtype else lift(host(x).to(dtype), x.device)


def matmul_backward(gradient: Tensor, a: Tensor, b: Tensor, mask: list[bool]) -> tuple[Tensor | None, ...]:
    """As `aten::matmul_backward`, which only devices outside torch have."""
    CALLS["matmul_backward"] += 1
    grads = _differentiated(torch.matmul, [a, b], gradient)
    return tuple(grad if wanted else None for grad, wanted in zip(grads, mask, strict=True))


def _differentiated(function: Callable[..., Tensor], operands: list[Tensor], gradient: Tensor) -> list[Tensor]:
    """Gradients of a function of the host, on the device."""
    below = [host(x.detach()).clone() for x in operands]
    given = host(gradient.detach()).clone()

    def run() -> tuple[Tensor, ...]:
        leaves = [x.requires_grad_() for x in below]
        return torch.autograd.grad(function(*leaves), leaves, given)

    return [lift(grad, gradient.device) for grad in _clean.submit(run).result()]


def _told(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def attention(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """As `npu_fusion_attention`, by the strict stand-in."""
    CALLS["npu_fusion_attention"] += 1
    told = _told(torch.ops.npu.npu_fusion_attention.default._schema, args, kwargs)
    device = told["query"].device
    below = {name: host(x) if on_device(x) else x for name, x in told.items()}
    return tuple(lift(x, device) if isinstance(x, Tensor) else x for x in fusion_attention(**below))


RENAMED = {"scale_value": "scale"}
ONLY_FORWARD = ("query", "key", "value", "head_num", "input_layout", "atten_mask", "scale", "keep_prob", "pre_tockens",
                "next_tockens", "sparse_mode", "actual_seq_qlen", "actual_seq_kvlen")  # fmt: skip


def attention_backward(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """As `npu_fusion_attention_grad`: the gradient of the same call, whose softmax must be the one that was saved."""
    CALLS["npu_fusion_attention_grad"] += 1
    told = _told(torch.ops.npu.npu_fusion_attention_grad.default._schema, args, kwargs)
    told = {RENAMED.get(name, name): x for name, x in told.items()}
    call = {name: host(x) if on_device(x) else x for name, x in told.items() if name in ONLY_FORWARD}
    operands = [told[name] for name in ("query", "key", "value")]
    again = fusion_attention(**call)
    saved = host(told["softmax_max"])
    assert torch.equal(again[1].nan_to_num(7), saved.nan_to_num(7)), "the saved softmax is another call's"

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return fusion_attention(**{**call, "query": query, "key": key, "value": value})[0]

    empty = operands[0].new_empty(0)
    rest = len(torch.ops.npu.npu_fusion_attention_grad.default._schema.returns) - 3
    return (*_differentiated(forward, operands, told["dy"]), *([empty] * rest))


OWN: dict[str, Callable[..., Any]] = {
    "copy_": copy_,
    "_to_copy": to_copy,
    "_foreach_copy_": foreach_copy_,
    "_local_scalar_dense": item,
    "matmul_backward": matmul_backward,
}


def autoload() -> None:
    """Called by torch at the end of its import."""
    import torch_npu  # noqa: F401

    for full, operator in overloads():
        name = full.removeprefix("aten::")
        if name not in OWN and not name.startswith("_copy_from"):
            define(_library, name, kernel(operator, name))
    for name, function in OWN.items():
        define(_library, name, function)
    for name, function in {
        "npu_dtype_cast": cast,
        "_npu_dtype_cast": cast,
        "npu_fusion_attention": attention,
        "npu_fusion_attention_grad": attention_backward,
    }.items():
        define(_own, name, function)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """What was called inside."""
    before = CALLS.copy()
    found: Counter[str] = Counter()
    yield found
    found.update(CALLS - before)
