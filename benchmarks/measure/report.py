"""The result file of a benchmark: what was measured, on what, with which versions, at which commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"


def hardware() -> tuple[str, str]:
    """A sentence and a slug."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), "")
    model = model or platform.processor() or platform.machine()
    cores = os.cpu_count()
    slug = "-".join("".join(c if c.isalnum() else " " for c in model.lower()).split())
    return f"{model}, {cores} cores", f"{slug}-{cores}c"


def commit() -> str:
    """The commit measured, and whether the tree held more than it."""
    told = [
        subprocess.run(["git", *asked], capture_output=True, text=True, cwd=RESULTS.parent).stdout.strip()
        for asked in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    ]
    return (told[0] or "unknown") + (" with changes" if told[1] else "")


def setting(packages: Sequence[str] = ("torch", "transformers"), threads: str = "one thread") -> str:
    """One line: hardware, versions, commit, date."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    machine = ", ".join([hardware()[0], threads])
    return "; ".join([machine, f"Python {platform.python_version()}", *versions, f"commit {commit()}", _today()]) + "."


def _today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table; the first column is text, the others numbers."""
    lines = [head, ["-", *["-:"] * (len(head) - 1)], *rows]
    return ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]


def goal(what: str, found: float, wanted: float, *, at_most: bool = False) -> str:
    """A line that says whether a goal was met."""
    met = found <= wanted if at_most else found >= wanted
    return f"- {what}: {found:.2f}, wanted {'≤' if at_most else '≥'} {wanted:g}: **{'met' if met else 'missed'}**"


def write(theme: str, lines: Sequence[str]) -> None:
    """Print a report, and put it into `results/THEME_HARDWARE_YYYYMM.md`."""
    print("\n".join(lines))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{theme}_{hardware()[1]}_{datetime.now(UTC):%Y%m}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
