"""Imports go one way, rooms without torch stay so, and no module is called after nothing.

The walk reads every import of the tree, also those inside functions, so that an upward edge cannot hide. What it
refuses is shown on planted faults below.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("training", "assets", "pipeline")
ORDER = (
    "errors config geometry sharding data ledger receipt parallel attention head compiling adapter weights model "
    "scores loss reference step checkpoint export evaluate setup loop attempt convert run ranks"
).split()
TORCH_FREE = {"errors", "config", "geometry", "sharding", "data", "ledger", "receipt"}
SAYS_NOTHING = {"utils", "helpers", "common", "misc"}


def imports(tree: ast.Module, module: str, package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a module imports; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                keep = len(parts) - node.level + (1 if package else 0)
                base = ".".join([*parts[:keep], *([base] if base else [])])
            for name in node.names:
                yield node.lineno, f"{base}.{name.name}"


def faults(root: Path) -> list[str]:
    """Every broken rule below `root`, as `file:line: sentence`."""
    found: list[str] = []
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            place = path.relative_to(root)
            package = place.name == "__init__.py"
            module = ".".join(place.parent.parts if package else place.with_suffix("").parts)
            if SAYS_NOTHING & set(module.split(".")):
                found.append(f"{place}:1: a module's name says what it holds; {module} does not")
            for line, name in imports(tree, module, package):
                found += [f"{place}:{line}: {fault}" for fault in _faults_of(module, name)]
    return found


def _faults_of(module: str, name: str) -> Iterator[str]:
    room, part = _place(module)
    target, target_part = _place(name)
    if target in ROOMS and ROOMS.index(target) > ROOMS.index(room):
        yield f"{module} imports {name}, which stands above it"
    if room == target == "training" and part and target_part and part != target_part:
        if part not in ORDER:
            yield f"{module} has no place in the order of training's modules"
        elif target_part in ORDER and ORDER.index(target_part) > ORDER.index(part):
            yield f"{module} imports {name}, which stands above it"
    if target in ("torch", "torch_npu") and (room != "training" or part in TORCH_FREE or not part):
        yield f"{module} imports torch, which takes seconds and is not for this room"
    if room == "training" and (target == "dagster" or (target == "dagster_pipes" and part != "run")):
        yield f"{module} imports {target}; training knows no Dagster, and only training.run speaks Pipes"
    if room in ("assets", "pipeline") and name == "__future__.annotations":
        yield f"{module} postpones annotations, which hides the types of Dagster's parameters"


def _place(name: str) -> tuple[str, str]:
    room, _, rest = name.partition(".")
    return room, rest.partition(".")[0]


def test_the_tree_keeps_its_layers():
    modules = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    assert len(modules) > 15
    assert faults(ROOT) == []


PLANTED = {
    "training/data/plan.py": ("def f():\n    from training.loop import train\n", 2, "stands above it"),
    "training/geometry.py": ("import training.data.pair\n", 1, "stands above it"),
    "training/ledger/meter.py": ("from ..scores import head\n", 1, "stands above it"),
    "training/ledger/__init__.py": ("from .. import run\n", 1, "stands above it"),
    "training/loop.py": ("def f():\n    import assets.launch\n", 2, "stands above it"),
    "assets/preferences.py": ("from pipeline import cli\n", 1, "stands above it"),
    "training/config.py": ("def f():\n    import torch.nn\n", 2, "imports torch"),
    "assets/checks.py": ("from torch import nn\n", 1, "imports torch"),
    "training/__init__.py": ("import torch\n", 1, "imports torch"),
    "training/step.py": ("import dagster as dg\n", 1, "knows no Dagster"),
    "training/reference.py": ("from dagster_pipes import open_dagster_pipes\n", 1, "only training.run speaks Pipes"),
    "training/data/utils.py": ("", 1, "says what it holds"),
    "pipeline/helpers/x.py": ("", 1, "says what it holds"),
    "pipeline/jobs.py": ("from __future__ import annotations\n", 1, "postpones annotations"),
    "training/sampler.py": ("from training.errors import PlanError\n", 1, "has no place in the order"),
}


@pytest.mark.parametrize("place", PLANTED)
def test_a_planted_fault_is_found(tmp_path, place):
    text, line, what = PLANTED[place]
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text(text)
    (fault,) = faults(tmp_path)
    assert fault.startswith(f"{place}:{line}: ")
    assert what in fault


def test_what_is_allowed_is_not_found(tmp_path):
    allowed = {
        "training/run.py": "import torch\nfrom dagster_pipes import open_dagster_pipes\nfrom training import loop\n",
        "training/data/plan.py": "from __future__ import annotations\nfrom .pair import Pair\nimport training.errors\n",
        "training/data/__init__.py": "from .pair import Pair\nfrom .. import errors\n",
        "assets/training.py": "import dagster as dg\nfrom training.data import plan\nfrom assets import launch\n",
        "pipeline/definitions.py": "from assets import training\n",
    }
    for place, text in allowed.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)
    assert faults(tmp_path) == []


def test_every_module_of_training_has_a_place():
    there = {path.stem if path.is_file() else path.name for path in (ROOT / "training").iterdir()}
    assert there - {"__init__", "__pycache__"} <= set(ORDER)
