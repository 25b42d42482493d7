"""One thread: runs on the CPU are then the same bit for bit, and tests do not fight over cores."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)
