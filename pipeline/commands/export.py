"""`pairledger export`: a checkpoint as a model."""

import argparse
from pathlib import Path

from pipeline.console import emit, facts

HELP = "write the model that a checkpoint holds"
ABOUT = """Write a checkpoint's weights as a Hugging Face folder with tokenizer and model card: an adapter merged or
alone, as its run's configuration says. Datasets and base model must still be where the run found them."""
EXAMPLE = """  pairledger export store/runs/run-1f0c/checkpoints/step_40 --out models/step-40
  pairledger export store/runs/run-1f0c/checkpoints/step_40 --out models/step-40-bf16 --dtype bf16"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("checkpoint", metavar="CKPT", help="a step_N folder below a run's checkpoints")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write; must not be there yet")
    types = ("source", "bf16", "fp32")
    parser.add_argument("--dtype", choices=types, default="source", help="type of the weights (default: the base's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object for machines")


def run(arguments: argparse.Namespace) -> int:
    """Export."""
    from training.convert import export_checkpoint

    made = export_checkpoint(Path(arguments.checkpoint), Path(arguments.out), dtype=arguments.dtype)
    (emit if arguments.json else facts)({"model": str(made)})
    return 0
