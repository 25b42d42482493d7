"""`pairledger plan`: what each step will hold, before a device is taken."""

import argparse
from pathlib import Path
from typing import Any

from pipeline.console import console, emit, facts, table
from training.errors import ConfigError

HELP = "steps, fill, loss density and balance of a run, before it is started"
ABOUT = """Make the step plan of some datasets and predict each step's counters from the lengths alone. The ledger of a
run with the same numbers will say the same, to the integer."""
EXAMPLE = """  pairledger plan prepared/mine --pairs-per-step 64 --pack-tokens 4096
  pairledger plan prepared/a prepared/b --pairs-per-step 128 --pack-tokens 8192 --epochs 2 --dp 4 --ulysses 2 --json"""

SHOWN = 12


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("datasets", nargs="+", metavar="DATASET", help="folder of a prepared dataset")
    parser.add_argument(
        "--pairs-per-step", type=int, required=True, metavar="N", help="pairs of one optimizer step, over all ranks"
    )
    parser.add_argument("--pack-tokens", type=int, required=True, metavar="N", help="room of one pack")
    parser.add_argument("--epochs", type=int, default=1, metavar="E", help="passes over the pairs (default: 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="decides the order (default: 0)")
    parser.add_argument(
        "--layout",
        choices=("shared", "concat"),
        default="shared",
        help="prompt once or twice in a pack (default: shared)",
    )
    parser.add_argument("--dp", type=int, default=1, metavar="D", help="ranks that see different packs (default: 1)")
    parser.add_argument("--cp", type=int, default=1, metavar="C", help="context-parallel ranks (default: 1)")
    parser.add_argument(
        "--ulysses", type=int, default=1, metavar="U", help="ranks that exchange sequence for heads (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for machines")


def run(arguments: argparse.Namespace) -> int:
    """Predict and show."""
    from training.config import PlanConfig, RunConfig, parse
    from training.data.packing import predict
    from training.data.plan import make_plan
    from training.data.shards import open_dataset

    fields = {name: getattr(arguments, name) for name in PlanConfig.model_fields if hasattr(arguments, name)}
    config = parse({"plan": fields}, RunConfig, where="command line")
    topology = parse_topology(arguments)
    plan = make_plan([open_dataset(Path(path)) for path in arguments.datasets], config.data, config.plan)
    steps = predict(
        plan,
        epochs=config.plan.epochs,
        topology=topology,
        pack_tokens=arguments.pack_tokens,
        layout=config.plan.layout,
    ).to_pylist()
    found = {"plan": plan.fingerprint, **totals(steps), "balance": _balance(steps)}
    if arguments.json:
        emit({**found, "by_step": steps})
        return 0
    facts(found)
    shown = [step for step in steps if step["step"] <= SHOWN]
    columns = [
        "step",
        "epoch",
        "pairs",
        "packs",
        "source_tokens",
        "loss_tokens",
        "pack_fill",
        "loss_density",
        "cost max/mean",
    ]
    table(columns, [_row(step) for step in shown], title="predicted, by step")
    if len(steps) > len(shown):
        console().print(f"[dim]… {len(steps) - len(shown):,} more steps; --json has them all[/dim]")
    return 0


def parse_topology(arguments: argparse.Namespace) -> Any:
    """The mesh of the command line.

    Raises:
        ConfigError: a degree below 1, or room that is no multiple of what the topology needs.
    """
    from training.config import Topology

    degrees = {"dp_shard": arguments.dp, "cp": arguments.cp, "ulysses": arguments.ulysses}
    for name, degree in degrees.items():
        if degree < 1:
            raise ConfigError(f"--{name.removesuffix('_shard')} {degree}: a mesh dimension has at least one rank")
    topology = Topology(**degrees)
    room = arguments.pack_tokens
    if room < 1 or room % topology.multiple:
        least = max(1, -(-room // topology.multiple)) * topology.multiple
        raise ConfigError(
            f"--pack-tokens {room} is no multiple of {topology.multiple}, which this topology needs; use {least}"
        )
    return topology


def totals(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over steps and the shares made of them."""
    names = ("pairs", "packs", "window_tokens", "physical_tokens", "source_tokens", "logical_tokens", "loss_tokens")
    sums = {name: sum(step[name] for step in steps) for name in names}
    return {"steps": len(steps), **sums, **_shares(sums), "sharing": sums["source_tokens"] / sums["logical_tokens"]}


def _shares(counted: dict[str, Any]) -> dict[str, float]:
    return {
        "pack_fill": counted["source_tokens"] / counted["window_tokens"],
        "loss_density": counted["loss_tokens"] / counted["source_tokens"],
    }


def _balance(steps: list[dict[str, Any]]) -> float:
    """The worst step's cost of its heaviest rank over the ranks' mean; 1 is even."""
    return max(step["cost_max_over_mean"] for step in steps)


def _row(step: dict[str, Any]) -> list[Any]:
    names = ("step", "epoch", "pairs", "packs", "source_tokens", "loss_tokens")
    return [*(step[name] for name in names), *_shares(step).values(), step["cost_max_over_mean"]]
