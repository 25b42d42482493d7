"""The store that fits on a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.ledger import shop


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return shop.make_store(tmp_path / "store")
