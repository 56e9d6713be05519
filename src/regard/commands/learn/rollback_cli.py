"""`regard rollback`."""

import argparse
import json
from pathlib import Path

from regard.runs.arguments import parse_number

HELP = "Write the model of a run as it was after one of its tasks."
EXAMPLES = """examples:
  regard rollback runs/db 3 --out models/db-3
  regard rollback runs/db athlete-village --method prescale --seed 508 --out m

Load DIR with AutoModelForSequenceClassification. For methods with their own
weights (l2p, ctr, idbr, and all with adapters or prompts), use load_network
from regard.continual.models; for the adapters of sapt, load_adapters from
regard.continual.saved_adapters. lineage.json lists the tasks, their order, and
the base model.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder written by `regard learn`")
    parser.add_argument("task", metavar="TASK", help="last task to restore: its position, from 1, or name")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--method", metavar="NAME", help="method, if RUN has several")
    parser.add_argument("--seed", metavar="N", help="seed, if RUN has several")
    parser.add_argument("--overwrite", action="store_true", help="overwrite an earlier exported model in DIR")


def run(args: argparse.Namespace) -> None:
    """Write the model and print the tasks it was trained on."""
    seed = None if args.seed is None else int(parse_number(args.seed, int, "--seed"))
    from regard.commands.learn.rollback import rollback
    from regard.continual.models import LINEAGE
    from regard.runs.command_line import print_summary

    out = rollback(args.run, args.task, args.out, method=args.method, seed=seed, overwrite=args.overwrite)
    lineage = json.loads((out / LINEAGE).read_text(encoding="utf-8"))
    names = [task["name"] for task in lineage["tasks"]]
    print_summary(f"{lineage['base']} after {', '.join(names)} ({lineage['method']['name']})", out)
