"""A checkpoint as a model: exported anywhere, in any type, without training on."""

from __future__ import annotations

from pathlib import Path

from training.attempt import export_run
from training.checkpoint import restore_weights, verified
from training.config import load_run
from training.errors import ConfigError, IdentityError
from training.model import load_model
from training.parallel.device import pick
from training.parallel.mesh import ALONE
from training.receipt import check_identity, open_checkpoint
from training.setup import prepare


def export_checkpoint(folder: Path, out: Path, *, dtype: str) -> Path:
    """Write the model that a checkpoint holds, with its tokenizer and model card; `dtype` as in `training.export`.

    Configuration, datasets and base model are those that the attempt which saved it ran with.

    Raises:
        ConfigError: `out` is there already.
        IdentityError: the folder is no checkpoint, is altered, or what it was trained from has changed.
    """
    if out.exists():
        raise ConfigError(f"{out}: is there already; name another folder")
    checkpoint = open_checkpoint(folder)
    if verified([checkpoint], ALONE) is None:
        raise IdentityError(f"{folder}: altered since it was saved; name another checkpoint")
    run_dir = checkpoint.folder.parents[1]
    config = load_run(run_dir / "attempts" / f"{checkpoint.manifest['ledger']['attempt']:04d}" / "config.toml")
    run = prepare(config, run_dir.parents[1])
    check_identity(checkpoint, run.identity)
    policy = load_model(config.model, pick("cpu"), seed=config.plan.seed)
    restore_weights(checkpoint, policy.module)
    export_run(policy, run, checkpoint.step, out, dtype=dtype)
    return out
