"""`pairledger ui`: the Dagster UI and its daemon, for this machine alone."""

import argparse
import os
import socket
import sys
from pathlib import Path

from training.errors import ConfigError

INSTANCE = """\
# Dagster's instance of this folder; see docs/dagster.md for more that can be set
telemetry:
  enabled: false
nux:
  enabled: false
concurrency:
  pools:
    granularity: op
    default_limit: 1
run_monitoring:
  enabled: true
  free_slots_after_run_end_seconds: 5
"""

WORKSPACE = """\
load_from:
  - python_module:
      module_name: pipeline.definitions
      location_name: pairledger
"""
FILES = {"dagster.yaml": INSTANCE, "workspace.yaml": WORKSPACE}
"""What makes a folder an instance; the repository has its own."""

HELP = "the Dagster UI on 127.0.0.1"
ABOUT = """Start Dagster's web server and daemon on 127.0.0.1 with this project as their code location. DAGSTER_HOME is
taken from the environment, else it is the working directory. Telemetry is off."""
EXAMPLE = """  pairledger ui
  pairledger ui --port 3333"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--port", type=int, default=3000, metavar="N", help="port on 127.0.0.1 (default: 3000)")


def run(arguments: argparse.Namespace) -> int:
    """Become `dagster dev`; does not come back."""
    if not 0 < arguments.port < 65536:
        raise ConfigError(f"--port {arguments.port}: a port is a number from 1 to 65535")
    _free(arguments.port)
    home = dagster_home()
    print(f"http://127.0.0.1:{arguments.port}  (DAGSTER_HOME {home})", flush=True)
    # `dg dev`, which the warning recommends, works in a project's folder only; this works anywhere
    quiet = ["-W", "ignore:Function `dev_command` is superseded"]
    command = ["-m", "dagster", "dev", "-w", str(home / "workspace.yaml"), "-h", "127.0.0.1", "-p", str(arguments.port)]
    os.execv(sys.executable, [sys.executable, *quiet, *command])


def _free(port: int) -> None:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"--port {port}: cannot be used on 127.0.0.1 ({error.strerror}); is the UI running already? "
                "Name another with --port"
            ) from None


def dagster_home() -> Path:
    """Set DAGSTER_HOME for this process and its children, and make the folder an instance.

    Raises:
        ConfigError: DAGSTER_HOME is set to a relative path, which Dagster refuses.
    """
    home = Path(os.environ.get("DAGSTER_HOME") or Path.cwd())
    if not home.is_absolute():
        raise ConfigError(f"DAGSTER_HOME = {home} is relative; set it to {home.resolve()}")
    home.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        if not (home / name).exists():
            (home / name).write_text(text, encoding="utf-8")
    os.environ.update(DAGSTER_HOME=str(home), DAGSTER_DISABLE_TELEMETRY="1")
    return home
