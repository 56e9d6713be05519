"""`regard rollback`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from regard.runs.arguments import parse_number

HELP = "Write a learnt model as it was after one of its tasks."
EXAMPLES = """examples:
  regard rollback runs/db 3 --out models/db-3
  regard rollback runs/db athlete-village --method prescale --seed 508 --out m

AutoModelForSequenceClassification loads DIR; of methods with weights of their
own (l2p, ctr, idbr, and all with blocks or prompts) load_network does, in
regard.continual.models, and of sapt's blocks load_adapters, in
regard.continual.saved_adapters. lineage.json and its config say which tasks it
has learnt, in which order, from which base.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder that `regard learn` has written")
    parser.add_argument("task", metavar="TASK", help="the last task to be known: its place, from 1, or its name")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--method", metavar="NAME", help="method, where RUN has several")
    parser.add_argument("--seed", metavar="N", help="seed, where RUN has several")
    parser.add_argument("--overwrite", action="store_true", help="write over an earlier such model in DIR")


def run(given: argparse.Namespace) -> None:
    """Write the model, and say what it knows."""
    seed = None if given.seed is None else int(parse_number(given.seed, int, "--seed"))
    from regard.commands.learn.rollback import rollback
    from regard.continual.models import LINEAGE
    from regard.runs.command_line import print_summary

    out = rollback(given.run, given.task, given.out, method=given.method, seed=seed, overwrite=given.overwrite)
    lineage = json.loads((out / LINEAGE).read_text(encoding="utf-8"))
    names = [task["name"] for task in lineage["tasks"]]
    print_summary(f"{lineage['base']} after {', '.join(names)} ({lineage['method']['name']})", out)
