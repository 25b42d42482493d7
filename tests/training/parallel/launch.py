"""A program in several processes, as torchrun starts it, on this machine's loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def launch(program: str, ranks: int, *arguments: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    """Run `tests/training/parallel/PROGRAM` in `ranks` processes of one thread each."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [sys.executable, *torchrun, str(Path(__file__).parent / program), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=seconds,
        check=False,
    )
