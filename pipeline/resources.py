"""The project's configuration and the resources built from it.

The configuration is the file that PAIRLEDGER_CONFIG names, else `pairledger.toml` in the working directory, else the
demonstration's own, whose paths are relative to the working directory. PAIRLEDGER_STORE, where set, is the store
instead of the configured one.
"""

import os
from pathlib import Path

from assets.launch import Accelerator, LocalLauncher
from assets.store import ShardStore, TokenLedger
from training.config import ProjectConfig, load_project

DEMO = Path(__file__).with_name("demo.toml")


def find_project() -> ProjectConfig:
    """The project's configuration.

    Raises:
        ConfigError: it is missing or breaks a rule; the message is one sentence a fault.
    """
    own = Path("pairledger.toml")
    path = Path(os.environ.get("PAIRLEDGER_CONFIG") or (own if own.exists() else DEMO))
    project = load_project(path, base=Path.cwd() if path == DEMO else None)
    store = os.environ.get("PAIRLEDGER_STORE")
    return project.model_copy(update={"store": str(Path(store).resolve())}) if store else project


def resources(project: ProjectConfig) -> dict[str, object]:
    """What assets take: the configuration, the shard store, the ledger, the launcher and the accelerator."""
    devices = project.devices
    return {
        "project": project,
        "store": ShardStore(root=project.store),
        "ledger": TokenLedger(root=project.store),
        "launcher": LocalLauncher(),
        "accelerator": Accelerator(
            kind=devices.kind,
            count=devices.processes,
            dp_replicate=devices.dp_replicate,
            dp_shard=devices.dp_shard,
            cp=devices.cp,
            ulysses=devices.ulysses,
        ),
    }
