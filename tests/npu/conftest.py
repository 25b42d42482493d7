"""This suite runs in an environment of its own, which `make test-npu` makes; elsewhere it is skipped and says so."""

from __future__ import annotations

import importlib.util
import warnings

import pytest

if THERE := importlib.util.find_spec("torch_npu") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_npu's own, of which importing torch also imports all
        import torch

        torch.npu.init()

PROVES = """\
what this suite proves, with the real torch_npu wheel: the calls of its front end, its dispatch, autograd and allocator,
    the layout of every call of attention and its gradient, the ledger's integers, the wiring of collectives
what it cannot: CANN and its kernels are emulated on the host, so nothing of their numerics, speed, memory, or of what
    goes wrong when work on a device is not waited for"""

HERE = __file__.rpartition("/")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not THERE:
        for item in items:
            if str(item.path).startswith(HERE):
                item.add_marker(pytest.mark.skip(reason="needs torch_npu and the emulated CANN: make test-npu"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if THERE:
        terminalreporter.write_line(PROVES)
